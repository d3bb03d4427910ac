# SPDX-License-Identifier: Apache-2.0
"""Checks records before a run starts: their fields, and whether they make a step. Nothing is stored."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Optional

from nemo2.base.errors import DataError
from nemo2.data.finetuning.encode import EMPTY, BadRecords, Limits, encode_all, nothing_left
from nemo2.data.finetuning.packing import pack
from nemo2.data.finetuning.sample import Empty, Encoder, Malformed
from nemo2.data.finetuning.sources import Source

MOST_RECORDS = 20_000
"""Records of a split that are read."""
MOST_ENCODED = 1024
"""Records of a split that are encoded."""


def check_records(
    source: Source,
    encoder: Encoder,
    limits: Limits,
    *,
    encodes: bool,
    rows: int,
    capacity: Optional[int],
    align: int = 1,
) -> None:
    """Check the fields of the first `MOST_RECORDS` records, and encode as many of the first `MOST_ENCODED` as fill
    ``rows``.

    Args:
        encodes: Whether the encoder has its tokenizer. False: nothing is encoded.
        rows: The smallest number of rows.
        capacity: Tokens of a packed row. None: a row holds one sample.
        align: See `pack`.

    Raises:
        ConfigError: a setting of the samples does not fit the tokenizer.
        DataError: a record is malformed, or all records are read and make fewer rows.
    """
    bad = BadRecords(limits)
    every = iter(source.records(bad))
    records = islice(every, MOST_RECORDS)
    first = iter(list(islice(records, MOST_ENCODED)))
    lengths: list[int] = []

    def until_filled() -> Iterator[Any]:
        while len(lengths) < rows if capacity is None else sum(lengths) <= (rows - 1) * capacity:
            if (record := next(first, None)) is None:
                return
            yield record

    for sample in encode_all(until_filled() if encodes else (), encoder, bad):
        lengths.append(len(sample.ids) - 1)
    unencoded = 0
    for where, record in chain(first, records):
        try:
            bad.note_unread(encoder.check(record))
            unencoded += 1
        except Empty as why:
            bad.into.note(EMPTY, where, str(why))
        except Malformed as why:
            bad.report(where, str(why))
    bad.refuse_idle()
    if next(every, None) is not None:
        return
    samples = len(lengths) + unencoded
    if samples == 0:
        raise nothing_left(source.name, bad.into)
    full, what = samples, "samples"
    if capacity is not None and not unencoded:
        full, what = len(pack(lengths, capacity, align=align)), "packed rows"
    if full < rows:
        raise DataError(
            f"{source.name} has {full} {what}, fewer than one global batch of {rows}. Use more data, or a smaller "
            "data.global_batch_size."
        )
