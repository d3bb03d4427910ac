# SPDX-License-Identifier: Apache-2.0
"""Packs several samples into one row, and measures how full the rows are.

A row is one micro-batch whose sequences do not attend to each other (``cu_seqlens``). Context parallelism splits each
sequence of a row into 2 * cp equal chunks, so each sequence is padded to a multiple of that.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Optional

import numpy as np

from nemo2.base.counts import counted, is_count
from nemo2.base.errors import ConfigError, DataError
from nemo2.config.capture import configurable
from nemo2.config.notices import warn_without_effect

_log = logging.getLogger(__name__)


@configurable
@dataclass
class PackedSequenceSpecs:
    """Select whether and how samples are packed.

    Attributes:
        packed_sequence_size: Tokens per row, equal to ``data.seq_length``. -1 or 0: samples aren't packed.
        tokenizer_model_name: Part of the name of the packs' folder, for readers. Packs never mix tokenizers, whatever
            it says. None: not in the name.
        packed_train_data_path, packed_val_data_path: The folder that holds the training or validation samples and their
            packs, in place of a folder beside the data. It is created if it doesn't exist, and written again if the
            data has changed.
        packed_metadata_path: A JSON file that receives the number of rows, their padding and the longest list of
            sequences.
        pad_cu_seqlens: Give all rows of a split equally long lists of sequences, so that the shape of a batch never
            changes.

    Raises:
        ConfigError: an invalid size, or an array file of NeMo's.
    """

    packed_sequence_size: int = -1
    tokenizer_model_name: Optional[str] = None
    packed_train_data_path: Optional[str] = None
    packed_val_data_path: Optional[str] = None
    packed_metadata_path: Optional[str] = None
    pad_cu_seqlens: bool = False

    def __post_init__(self) -> None:
        size = self.packed_sequence_size
        if not is_count(size, least=-1):
            raise ConfigError(f"packed_sequence_size={size!r}: must be a number of tokens, or -1 for no packing.")
        for name in ("packed_train_data_path", "packed_val_data_path"):
            if str(getattr(self, name) or "").endswith(".npy"):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: NeMo's packed files are pickles, and loading a pickle can run "
                    "code, so nemo2 does not read them. Name a folder instead. Packing again takes seconds."
                )
        if not self.active:
            others = [field for field in fields(self) if field.name != "packed_sequence_size"]
            warn_without_effect(
                f"Samples are not packed, because packed_sequence_size is {size}.",
                **{other.name: (getattr(self, other.name), other.default) for other in others},
            )

    @property
    def active(self) -> bool:
        """Whether samples are packed."""
        return self.packed_sequence_size > 0


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, *, align: int = 1, seed: int = 1234) -> list[list[int]]:
    """The indices of the samples of each row, by best-fit decreasing.

    The longest sample is placed first, and each sample goes into the row with the least sufficient room. This needs at
    most 11/9 of the smallest possible number of rows, plus one. Samples of equal length are placed in a random order
    from ``seed``, so that neighbors in a file don't stay together. The rows are also shuffled, because otherwise the
    first rows would hold the longest samples.

    Args:
        lengths: Tokens of each sample.
        capacity: Tokens of a row.
        align: The length of each sample is rounded up to a multiple of this.

    Raises:
        DataError: a sample is longer than a row.
    """
    taken = aligned(np.asarray(lengths, dtype=np.int64), align)
    if len(taken) and int(taken.max()) > capacity:
        longest = int(taken.argmax())
        raise DataError(
            f"Sample {longest} has {int(taken[longest])} tokens, but a row holds only {capacity}. Raise "
            "data.seq_length."
        )
    random = np.random.default_rng(seed)
    order = np.lexsort((random.permutation(len(taken)), -taken))
    rows: list[list[int]] = []
    room: list[int] = []
    """The different numbers of free tokens in rows, ascending."""
    with_room: dict[int, list[int]] = {}
    for index in order.tolist():
        length = int(taken[index])
        place = bisect_left(room, length)
        if place < len(room):
            free = room[place]
            row = with_room[free].pop()
            if not with_room[free]:
                room.pop(place)
        else:
            row, free = len(rows), capacity
            rows.append([])
        rows[row].append(index)
        if left := free - length:
            waiting = with_room.setdefault(left, [])
            if not waiting:
                insort(room, left)
            waiting.append(row)
    return [rows[row] for row in random.permutation(len(rows))]


def aligned(length: np.ndarray, align: int) -> np.ndarray:
    """The next multiple of ``align``."""
    return -(-length // align) * align


@dataclass(frozen=True)
class Fullness:
    """The padding of the rows, with and without packing.

    Attributes:
        samples, rows: The numbers of samples and rows.
        padding: The fraction of the rows' tokens that is padding.
        padding_unpacked: The fraction if each sample had its own row.
        padding_to_longest: The fraction if each sample had a row as long as the longest sample's.
        most: The largest number of samples in a row.
    """

    samples: int
    rows: int
    padding: float
    padding_unpacked: float
    padding_to_longest: float
    most: int

    @classmethod
    def of(cls, lengths: np.ndarray, rows: Sequence[Sequence[int] | np.ndarray], capacity: int) -> "Fullness":
        tokens = int(lengths.sum())
        samples = len(lengths)
        return cls(
            samples=samples,
            rows=len(rows),
            padding=1 - tokens / max(1, len(rows) * capacity),
            padding_unpacked=1 - tokens / max(1, samples * capacity),
            padding_to_longest=1 - tokens / max(1, samples * int(lengths.max(initial=1))),
            most=max(map(len, rows), default=0),
        )

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} in {counted(self.rows, 'row')}, {self.samples / max(1, self.rows):.1f} each: "
            f"padding is {100 * self.padding:.1f}% of the tokens, and was {100 * self.padding_unpacked:.1f}% with a row "
            f"per sample ({100 * self.padding_to_longest:.1f}% with rows as long as the longest)"
        )
