# SPDX-License-Identifier: Apache-2.0
"""Steps from a source that is read during training, without tokenizing beforehand or storing anything.

Each item is a rank's part of one global batch, as in `nemo2.data.batch_sampler`. A resumed run reads the source again
up to its position. Malformed records are found when they are read. Truncated and dropped records are reported after
each pass.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Optional

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from nemo2.base.errors import DataError
from nemo2.data.batch_sampler import BEGINNING, Place, share_of
from nemo2.data.finetuning.encode import BadRecords, Limits, encode_whole
from nemo2.data.finetuning.packing import pack
from nemo2.data.finetuning.rows import Arrays, row_of
from nemo2.data.finetuning.sample import Encoder
from nemo2.data.finetuning.sources import Source

_log = logging.getLogger(__name__)
BUFFER = 1024
"""The number of samples in the buffer that is packed or shuffled."""

Rows = Iterator[dict[str, Tensor]]


class StreamedSteps(IterableDataset[Any]):
    """This rank's parts of global batches. Training repeats passes; other uses make one pass.

    Args:
        rows: A function that returns the rows of a pass, by the pass's number.
        collate: A function that makes a batch of rows.
        global_batch_size: Rows per step, over all ranks.
        share: The micro-batch size, this rank's data-parallel rank, and the data-parallel size.
        position: A function that returns the samples consumed so far; called at the start. None: one pass from the
            start, without the samples after the last whole global batch.
        begun: A function that returns where a resume began (`place`), as of `StepBatchSampler`.

    Raises:
        DataError: during iteration, if a pass has too few rows for a step.
    """

    def __init__(
        self,
        rows: Callable[[int], Rows],
        collate: Callable[[list[dict[str, Tensor]]], Any],
        *,
        global_batch_size: int,
        share: tuple[int, int, int],
        position: Optional[Callable[[], int]] = None,
        begun: Callable[[], Place] = lambda: BEGINNING,
    ) -> None:
        self.rows, self.collate, self.position, self.begun = rows, collate, position, begun
        self.global_batch_size, self.places = global_batch_size, share_of(global_batch_size, *share).tolist()
        self._passes: list[Place] = []
        """The starts of the passes that were read."""

    def place(self) -> Place:
        """The position of training, for a checkpoint: the samples consumed, the number of the current pass, and the samples
        that had been consumed when it began."""
        consumed = 0 if self.position is None else self.position()
        reached = [place for place in (BEGINNING, self.begun(), *self._passes) if place[0] <= consumed]
        return consumed, *max(reached)[1:]

    def __iter__(self) -> Iterator[Any]:
        size, (consumed, number, start) = self.global_batch_size, self.place()
        while True:
            rows = self.rows(number)
            used = sum(1 for _ in islice(rows, max(0, consumed - start)))
            if start + used < consumed:  # a checkpoint of former releases doesn't tell the pass
                used -= used % size
            while len(batch := list(islice(rows, size))) == size:
                used += size
                yield self.collate([batch[place] for place in self.places])
            if used == 0:
                raise DataError(
                    f"One pass over the stream gives {len(batch)} rows, fewer than one global batch of {size}. Use "
                    "more data, or a smaller global_batch_size."
                )
            if self.position is None:
                return
            number, start = number + 1, start + used
            self._passes.append((start, number, start))


def streamed_rows(
    source: Source,
    encoder: Encoder,
    limits: Limits,
    number: int,
    *,
    capacity: Optional[int],
    align: int,
    pad_id: int,
    seed: Optional[int],
) -> Rows:
    """The rows of one pass over a source.

    Args:
        number: The number of the pass.
        capacity: The number of tokens in a packed row. None: one row per sample.
        seed: The seed for shuffling samples within a buffer, differently in each pass. None: samples keep their order.
    """
    bad = BadRecords(limits)
    encoded = encode_whole(source, encoder, bad)
    samples = ((np.asarray(one.ids, np.int64), np.asarray(one.trained, np.bool_)) for one in encoded)
    for block, held in enumerate(iter(lambda: list(islice(samples, BUFFER)), [])):
        yield from _of_block(held, capacity, align, pad_id, None if seed is None else (seed, number, block))
    if bad.into.places:
        _log.warning("Pass %d over %s: %s", number + 1, source.name, bad.into)


def _of_block(
    held: list[Arrays], capacity: Optional[int], align: int, pad_id: int, seed: Optional[tuple[int, ...]]
) -> Rows:
    order = np.arange(len(held)) if seed is None else np.random.default_rng(seed).permutation(len(held))
    held = [held[index] for index in order]
    if capacity is None:
        for arrays in held:
            yield row_of([arrays])
        return
    lengths = [len(ids) - 1 for ids, _ in held]
    for members in pack(lengths, capacity, align=align, seed=0 if seed is None else seed[0]):
        yield row_of([held[index] for index in members], align=align, pad_id=pad_id, packed=True)
