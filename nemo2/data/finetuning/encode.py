# SPDX-License-Identifier: Apache-2.0
"""Converts all records of a source to samples of a maximum length, and counts truncated and dropped records."""

import copy
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Optional

from nemo2.base.advice import dataset_setting
from nemo2.base.counts import counted, require_counts
from nemo2.base.errors import DataError
from nemo2.base.names import check_choice
from nemo2.data.documents import BadInput, OnBadLine
from nemo2.data.finetuning.fields import not_shown
from nemo2.data.finetuning.sample import Empty, Encoder, Malformed, Sample, Unread
from nemo2.data.finetuning.sources import Source
from nemo2.data.special_text import OnSpecialToken

OnTooLong = Literal["truncate", "skip", "fail"]
_CHUNK = 256
_SHOWN = 5
_TOO_LONG, EMPTY, _TRUNCATED, _MALFORMED = "too long", "nothing to train on", "truncated", "malformed"
_SPECIAL, _AS_TEXT = "with special tokens in its text", "with special tokens encoded as plain text"

_UNREAD, _LOST = "with fields that no sample shows", "with text that the tokenizer has no tokens for"
_KEPT = (_TRUNCATED, _SPECIAL, _AS_TEXT, _UNREAD, _LOST)


@dataclass
class Report:
    """What happened to the records of a split.

    Attributes:
        records: The number of records, including malformed ones.
        samples: The number of samples to train on.
        tokens, trained_tokens: The numbers of tokens, and of trained tokens, in these samples.
        places: For each outcome except the normal one, the positions of such records and the reasons, in order.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    places: dict[str, list[str]] = field(default_factory=dict)

    def note(self, fate: str, where: str, why: str) -> None:
        """Record a record that is dropped or changed."""
        self.places.setdefault(fate, []).append(f"{where}: {why}")

    def count(self, fate: str) -> int:
        """The number of records with this outcome, such as "too long", "nothing to train on", "truncated" or "malformed"."""
        return len(self.places.get(fate, []))

    def __str__(self) -> str:
        share = 100 * self.trained_tokens / max(1, self.tokens)
        tokens = f", {counted(self.tokens, 'token')}, {share:.1f}% of them trained on" if self.samples else ""
        lines = [f"{counted(self.samples, 'sample')} of {counted(self.records, 'record')}{tokens}"]
        for fate, places in self.places.items():
            shown = "; ".join(places[:_SHOWN]) + (" ..." if len(places) > _SHOWN else "")
            lines.append(f"{len(places):,} {'kept, but ' if fate in _KEPT else 'left out, '}{fate}: {shown}")
        return "\n".join(lines)


def nothing_left(name: str, report: Report) -> DataError:
    """The error of the records called ``name``, none of which makes a sample."""
    if not report.records and not report.places:
        return DataError(f"{name} is empty: it has no record to train on.")
    return DataError(f"{name} leaves nothing to train on. {report}")


def not_read(settings: Collection[str], who: str) -> str:
    """The message about settings that the samples of the data don't depend on. ``who``: "no record reads", for example."""
    return (
        f"data.dataset_kwargs has {', '.join(settings)}, which {who}: "
        "prompt_template, label_key, add_bos, add_eos, answer_only_loss and truncation are for records of text fields, "
        "chat_template and turns for conversations. Remove what is not read."
    )


@dataclass(frozen=True)
class Limits:
    """The limits on samples, and the treatment of records beyond them.

    Attributes:
        max_tokens: The largest number of tokens in a sample.
        on_too_long: "truncate"; "skip": leave out and count; "fail": an error.
        on_bad_line: For a malformed record: "fail": an error. "skip": leave it out and count it, up to
            ``max_bad_lines``.
        on_special_token: For a record whose text spells a special token of the tokenizer, which the model would read as
            that token: "keep": count it. "text": encode it as plain text, and count it. "fail": the record is malformed.

    Raises:
        ConfigError: an invalid value.
    """

    max_tokens: int
    on_too_long: OnTooLong = "truncate"
    on_bad_line: OnBadLine = "fail"
    max_bad_lines: int = 1000
    on_special_token: OnSpecialToken = "keep"

    def __post_init__(self) -> None:
        check_choice("on_too_long", self.on_too_long, OnTooLong)
        check_choice("on_bad_line", self.on_bad_line, OnBadLine)
        check_choice("on_special_token", self.on_special_token, OnSpecialToken)
        require_counts("data.dataset_kwargs", least=0, max_bad_lines=self.max_bad_lines)


class BadRecords(BadInput):
    """Malformed records, which are also counted in the report ``into``, and what no sample depends on."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(policy=limits.on_bad_line, limit=limits.max_bad_lines)
        self.limits, self.into = limits, Report()
        self.unread: Optional[Unread] = None
        """What all good records so far have in common. None: there are no such records."""
        self.num_good = 0

    @property
    def how_to_skip(self) -> str:
        return f" in a run with {dataset_setting('on_bad_line', 'skip')}"

    def report(self, where: str, why: str) -> None:
        super().report(where, why)
        self.into.records += 1
        self.into.note(_MALFORMED, where, why)

    def note_unread(self, unread: Unread) -> None:
        """Record what the sample of a good record doesn't depend on."""
        self.unread = unread if self.unread is None else self.unread.in_common_with(unread)
        self.num_good += 1

    def refuse_idle(self) -> None:
        """Called after the last record.

        Raises:
            DataError: all records have a field that no template names, or don't read a setting.
        """
        fields, settings = self.unread or Unread()
        if settings:
            raise DataError(not_read(settings, "no record of this data reads"))
        for name in fields:
            raise DataError(f"All {counted(self.num_good, 'record')}: {not_shown(name)}")


def encode_whole(source: Source, encoder: Encoder, bad: BadRecords, *, threads: int = 1) -> Iterator[Sample]:
    """`encode_all` of a source's records, and a check behind the last one.

    Raises:
        DataError: no sample remains, or see `encode_all` and `BadRecords.refuse_idle`.
    """
    yield from encode_all(source.records(bad), encoder, bad, threads=threads)
    if bad.into.samples == 0:
        raise nothing_left(source.name, bad.into)
    bad.refuse_idle()


def encode_all(
    records: Iterable[tuple[str, Any]], encoder: Encoder, bad: BadRecords, *, threads: int = 1
) -> Iterator[Sample]:
    """The samples of the records, in order. ``bad.into`` counts the outcomes.

    Args:
        records: Records with their places.
        threads: The number of threads. Tokenizers written in Rust release Python's lock, so several threads are faster.

    Raises:
        DataError: a record is malformed or too long, and the limits say "fail".
    """
    limits, report = bad.limits, bad.into
    for where, fate in _fates(records, encoder, limits.max_tokens, threads):
        if isinstance(fate, Malformed):
            bad.report(where, str(fate))
            continue
        if not isinstance(fate, Empty) and fate[0].special is not None and limits.on_special_token == "fail":
            bad.report(where, f"a text spells the special token {fate[0].special!r} (on_special_token)")
            continue
        report.records += 1
        if isinstance(fate, Empty):
            report.note(EMPTY, where, str(fate))
            continue
        sample, length = fate
        if sample.truncated:
            why = f"{length} tokens, and {limits.max_tokens} fit"
            if limits.on_too_long == "fail":
                raise DataError(
                    f"{where}: {why} (data.seq_length + 1). Raise data.seq_length, or allow it with "
                    "dataset_kwargs={'on_too_long': 'truncate'} or 'skip'."
                )
            if limits.on_too_long == "skip":
                report.note(_TOO_LONG, where, why)
                continue
            if sample.num_trained == 0:
                report.note(_TOO_LONG, where, f"{why}, which leaves nothing to train on")
                continue
            report.note(_TRUNCATED, where, why)
        elif sample.num_trained == 0:
            report.note(EMPTY, where, "no token of it is predicted and counted")
            continue
        if unshown := (*sample.unread.fields, *sample.beside):
            report.note(_UNREAD, where, ", ".join(map(repr, unshown)))
        if sample.lost is not None:
            report.note(_LOST, where, sample.lost)
        bad.note_unread(sample.unread)
        if sample.special is not None:
            report.note(_AS_TEXT if limits.on_special_token == "text" else _SPECIAL, where, repr(sample.special))
        report.samples += 1
        report.tokens += len(sample.ids)
        report.trained_tokens += sample.num_trained
        yield sample


Fate = Malformed | Empty | tuple[Sample, int]


def _fates(
    records: Iterable[tuple[str, Any]], encoder: Encoder, max_tokens: int, threads: int
) -> Iterator[tuple[str, Fate]]:
    """The outcome of each record, with its length before truncation."""
    if threads <= 1:
        for where, record in records:
            yield where, _fate(encoder, record, max_tokens)
        return
    own = threading.local()

    def of_chunk(chunk: list[tuple[str, Any]]) -> list[tuple[str, Fate]]:
        if not hasattr(own, "encoder"):
            # each thread has its own copy, because a tokenizer changes its own state while it encodes
            own.encoder = copy.deepcopy(encoder)
        return [(where, _fate(own.encoder, record, max_tokens)) for where, record in chunk]

    source = iter(records)
    with ThreadPoolExecutor(threads) as pool:
        # Only a few chunks are in flight, because a source may be larger than memory.
        while wave := [chunk for _ in range(2 * threads) if (chunk := list(islice(source, _CHUNK)))]:
            for fates in pool.map(of_chunk, wave):
                yield from fates


def _fate(encoder: Encoder, record: Any, max_tokens: int) -> Fate:
    try:
        sample = encoder.encode(record)
        length = len(sample.ids)
        return (sample if length <= max_tokens else encoder.truncate(record, sample, max_tokens)), length
    except (Malformed, Empty) as why:
        return why
