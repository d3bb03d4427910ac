# SPDX-License-Identifier: Apache-2.0
"""Converts text into tokens in Megatron's indexed format: ``PREFIX.bin``, ``PREFIX.idx`` and a description in
``PREFIX.json``."""

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Optional, Union

import numpy as np

from nemo2.base.advice import advice
from nemo2.base.counts import counted
from nemo2.base.errors import DataError
from nemo2.base.files import locked, refuse_existing, replaceable_file, sha256, temporary_beside
from nemo2.base.names import check_choice
from nemo2.data.documents import (
    BadInput,
    Inputs,
    Malformed,
    OnBadLine,
    find_files,
    read_documents,
    tokenized,
    unknown_in,
)
from nemo2.data.special_text import OnSpecialToken, as_plain_text, special_in
from nemo2.data.token_files import SUFFIXES, PreparedData, strip_suffix, token_files
from nemo2.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 20


def prepare_data(
    inputs: Inputs,
    output_prefix: Union[str, Path],
    tokenizer: Tokenizer,
    *,
    text_key: str = "text",
    append_eod: bool = True,
    on_bad_line: OnBadLine = "fail",
    max_bad_lines: int = 1000,
    on_special_token: OnSpecialToken = "keep",
    progress: bool = False,
    overwrite: bool = False,
) -> PreparedData:
    """Tokenize `inputs` into ``output_prefix.bin/.idx``, which `PreTrainingDataModule` reads.

    Each file is a document, or each record of a file of records. `nemo2.data.documents` describes the accepted inputs.
    Documents are written in the order of the inputs, without empty documents. The files appear only when they are
    complete, so a reader never sees an index that belongs to other tokens.

    Args:
        inputs: A file, directory or pattern, or a list of them.
        output_prefix: The path of the files to write, without their suffix.
        tokenizer: The tokenizer. `BPETokenizer` tokenizes batches in several threads.
        text_key: The field of a record that holds the text.
        append_eod: End each document with the tokenizer's ``eod``.
        on_bad_line: The action for a document that isn't text or that the tokenizer can't encode. "fail": an error that
            names file and line. "skip": leave it out and count it.
        max_bad_lines: With "skip", the largest number of bad documents. More are an error.
        on_special_token: The action for a document whose text spells a special token of the tokenizer. "keep": it becomes
            that token, and is counted. "text": it is encoded as plain text, and counted. "fail": the document is bad
            (``on_bad_line``).
        progress: Show a bar on the terminal.
        overwrite: Replace existing token files.

    Raises:
        OutputExists: some of the files exist, and ``overwrite`` is False.
        ConfigError: a setting is wrong, no files can be written there, or the tokenizer can't encode special tokens as plain
            text.
        DataError: an input is missing or unreadable, no document remains, or writing fails.
    """
    bad = BadInput(policy=on_bad_line, limit=max_bad_lines)
    check_choice("on_special_token", on_special_token, OnSpecialToken)
    plain = as_plain_text(tokenizer) if on_special_token == "text" else None
    prefix = Path(strip_suffix(output_prefix)).expanduser()
    for file in token_files(prefix):
        replaceable_file(file)
    refuse_existing(*token_files(prefix), overwrite=overwrite)
    files = find_files(inputs)
    eod = tokenizer.eod if append_eod else None
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _Writer(prefix, tokenizer.vocab_size) as writer, _progress(files, progress) as followed:
            special = getattr(tokenizer, "special_texts", ())
            documents = read_documents(followed, text_key=text_key, bad=bad)
            for where, text, ids in _tokenized(documents, tokenizer, bad):
                spelled = special_in([text], special) if ids else None
                if spelled is not None and on_special_token == "fail":
                    bad.report(where, f"the text spells the special token {spelled!r} (on_special_token)")
                    continue
                if spelled is not None and plain is not None:
                    ids = plain(text)
                writer.add(text, ids, eod)
                writer.with_special_tokens += spelled is not None
                writer.with_unknown_text += unknown_in(ids, tokenizer) is not None
            if writer.documents == 0:
                left_out = f", {bad.count} could not be read ({'; '.join(bad.examples)})" if bad.count else ""
                raise DataError(f"No text in {counted(len(files), 'input file')}: {writer.empty} empty{left_out}.")
            return writer.commit(tokenizer, eod, bad, on_special_token)
    except OSError as error:
        raise DataError(
            f"{prefix}.bin/.idx can't be written: {error}. Choose another {advice('--output', 'prefix')}."
        ) from error


class _Writer:
    """Write to temporary files beside the final names and rename them at the end. An error leaves no files behind."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = DType.optimal_dtype(vocab_size)
        self.temporary = temporary_beside(prefix)
        self.documents = self.tokens = self.characters = self.empty = 0
        self.max_token_id = -1
        self.with_special_tokens = self.with_unknown_text = 0
        self._digest = hashlib.sha256()
        # The temporary files of writers of `prefix` that were killed. A living writer holds a lock.
        for lock in prefix.parent.glob(f".{glob.escape(prefix.name)}.*.tmp.lock"):
            with contextlib.suppress(OSError), locked(lock) as dead:
                for suffix in (*SUFFIXES, ".lock") if dead else ():
                    Path(f"{str(lock).removesuffix('.lock')}{suffix}").unlink(missing_ok=True)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(f"{self.temporary}.lock", create=0o666))
        self._builder = IndexedDatasetBuilder(f"{self.temporary}.bin", dtype=self.dtype)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # on a full disk it can't write its buffer either
            self._builder.data_file.close()  # pyright: ignore[reportAttributeAccessIssue]
        for suffix in (*SUFFIXES, ".lock"):
            Path(f"{self.temporary}{suffix}").unlink(missing_ok=True)
        self._lock.close()

    def add(self, text: str, ids: list[int], eod: Optional[int]) -> None:
        if not ids:
            self.empty += 1
            return
        tokens = np.array(ids if eod is None else [*ids, eod], dtype=np.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"The tokenizer gave id {low if low < 0 else high} for {text[:40]!r}, which is outside its own "
                f"vocabulary of {self.vocab_size}. Its file is damaged, or its vocab_size is wrong."
            )
        tokens = tokens.astype(self.dtype)
        self._builder.add_document(tokens, [tokens.size])  # pyright: ignore[reportArgumentType]
        self._digest.update(tokens.tobytes())
        self.max_token_id = max(self.max_token_id, high)
        self.documents += 1
        self.tokens += tokens.size
        self.characters += len(text)

    def commit(
        self, tokenizer: Tokenizer, eod: Optional[int], bad: BadInput, special_tokens: OnSpecialToken
    ) -> PreparedData:
        self._builder.finalize(f"{self.temporary}.idx")
        prepared = PreparedData(
            prefix=str(self.prefix),
            documents=self.documents,
            tokens=self.tokens,
            characters=self.characters,
            empty_documents=self.empty,
            skipped_documents=bad.count,
            skipped_examples=bad.examples,
            documents_with_special_tokens=self.with_special_tokens,
            special_tokens=special_tokens,
            documents_with_unknown_text=self.with_unknown_text,
            vocab_size=self.vocab_size,
            eod=eod,
            max_token_id=self.max_token_id,
            dtype=np.dtype(self.dtype).name,
            bin_bytes=os.path.getsize(f"{self.temporary}.bin"),
            tokenizer=dict(tokenizer.unique_identifiers),
            sha256={"bin": self._digest.hexdigest(), "idx": sha256(f"{self.temporary}.idx")},
        )
        contents = {key: value for key, value in asdict(prepared).items() if key != "prefix"}
        Path(f"{self.temporary}.json").write_text(json.dumps(contents, indent=2) + "\n", "utf-8")
        # A dataset does not exist without its index, so the index is deleted first and written last.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            os.replace(f"{self.temporary}{suffix}", f"{self.prefix}{suffix}")
        return prepared


def _tokenized(
    documents: Iterator[tuple[str, str]], tokenizer: Tokenizer, bad: BadInput
) -> Iterator[tuple[str, str, list[int]]]:
    """Documents with their places and ids, tokenized in batches of about a million characters. Documents on which the tokenizer
    fails are reported to `bad`."""
    batch: list[tuple[str, str]] = []
    characters = 0
    for where, document in documents:
        batch.append((where, document))
        characters += len(document)
        if characters >= _BATCH_CHARACTERS:
            yield from _ids(batch, tokenizer, bad)
            batch, characters = [], 0
    yield from _ids(batch, tokenizer, bad)


def _ids(batch: list[tuple[str, str]], tokenizer: Tokenizer, bad: BadInput) -> Iterator[tuple[str, str, list[int]]]:
    many = getattr(tokenizer, "texts_to_ids", None)
    if many is not None:
        try:
            ids_of_all = many([text for _, text in batch])
        except Exception:  # the lines below find the document
            pass
        else:
            yield from ((where, text, ids) for (where, text), ids in zip(batch, ids_of_all, strict=True))
            return
    for where, text in batch:
        try:
            ids = tokenized(lambda text=text: tokenizer.text_to_ids(text), text)
        except Malformed as error:
            bad.report(where, str(error))
        else:
            yield where, text, ids


@contextlib.contextmanager
def _progress(files: list[Path], show: bool) -> Iterator[Iterable[Path]]:
    """`files`, with a bar over their bytes if ``show``."""
    if not show:
        yield files
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as bar:
        sizes = [file.stat().st_size for file in files]
        task = bar.add_task("", total=sum(sizes))

        def followed() -> Iterator[Path]:
            for file, size in zip(files, sizes, strict=True):
                yield file
                bar.advance(task, size)

        yield followed()
