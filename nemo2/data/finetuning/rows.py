# SPDX-License-Identifier: Apache-2.0
"""Converts samples and packs to tensors, and several of them to a batch.

An item of n + 1 token ids has ``tokens`` (all but the last id) and ``labels`` (all but the first id), int64 ``[n]``,
with ``loss_mask`` (float32, 1 for a trained label), ``padding_mask`` (bool, True for padding) and ``position_ids``.
A pack is an item of several consecutive samples. Positions restart at each sample, and ``cu_seqlens`` (int32) holds
the start of each sample and the end of the last one.

A batch pads items to one length, ``[rows, length]``, and pads ``cu_seqlens`` with -1 to ``[rows, most]``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Arrays = tuple[np.ndarray, np.ndarray]
"""The ids and flags of one sample."""


class SampleRows(Dataset[dict[str, Tensor]]):
    """One sample per item."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return row_of([self.samples.arrays(index)])


class PackedRows(Dataset[dict[str, Tensor]]):
    """Several samples per item.

    Args:
        samples: `nemo2.data.finetuning.store.Samples`.
        members, ends: The concatenated sample indices of all rows, and the end of each row in them.
        align: Each sample is padded to a multiple of this.
    """

    def __init__(self, samples: Any, members: np.ndarray, ends: np.ndarray, *, align: int, pad_id: int) -> None:
        self.samples, self.members, self.ends = samples, members, ends
        self.align, self.pad_id = align, pad_id

    def __len__(self) -> int:
        return len(self.ends)

    def samples_in(self, index: int) -> list[int]:
        """The indices of the samples in a row."""
        start = int(self.ends[index - 1]) if index else 0
        return self.members[start : int(self.ends[index])].tolist()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        arrays = [self.samples.arrays(sample) for sample in self.samples_in(index)]
        return row_of(arrays, align=self.align, pad_id=self.pad_id, packed=True)


def row_of(arrays: Sequence[Arrays], *, align: int = 1, pad_id: int = 0, packed: bool = False) -> dict[str, Tensor]:
    """The item of these samples, each padded to a multiple of ``align``."""
    places = [len(ids) - 1 for ids, _ in arrays]
    taken = [-(-length // align) * align for length in places]
    total = sum(taken)
    tokens, labels = np.full(total, pad_id, np.int64), np.full(total, pad_id, np.int64)
    mask, positions = np.zeros(total, np.float32), np.empty(total, np.int64)
    padding = np.ones(total, np.bool_)
    ends = [0]
    for (ids, trained), length, room in zip(arrays, places, taken, strict=True):
        here = slice(ends[-1], ends[-1] + length)
        tokens[here], labels[here], mask[here], padding[here] = ids[:-1], ids[1:], trained[1:], False
        positions[ends[-1] : ends[-1] + room] = np.arange(room)
        ends.append(ends[-1] + room)
    item = {"tokens": tokens, "labels": labels, "loss_mask": mask, "padding_mask": padding, "position_ids": positions}
    row = {name: torch.from_numpy(array) for name, array in item.items()}
    if packed:
        row["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
    return row


@dataclass(frozen=True)
class Collate:
    """Combine items of different lengths into a batch.

    Attributes:
        pad_id: The token of the padding, which doesn't count in the loss.
        length: The length of every batch. None: that of its longest item, rounded up to a multiple of ``multiple``.
        multiple: The divisor of the length. 2 * cp * tp allows a split over all ranks.
        at_most: The largest length to which the rounding may lead.
        most_ends: Columns of ``cu_seqlens``. None: as many as the batch needs.
    """

    pad_id: int
    length: Optional[int] = None
    multiple: int = 1
    at_most: Optional[int] = None
    most_ends: Optional[int] = None

    def __call__(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = self.length or self._length_of(items)
        fill = {"tokens": self.pad_id, "labels": self.pad_id, "loss_mask": 0, "padding_mask": True}
        batch = {
            name: torch.stack([_filled(item[name], length, value) for item in items]) for name, value in fill.items()
        }
        batch["position_ids"] = torch.stack([_counted_on(item["position_ids"], length) for item in items])
        if "cu_seqlens" in items[0]:
            most = self.most_ends or max(len(item["cu_seqlens"]) for item in items)
            batch["cu_seqlens"] = torch.stack([_filled(item["cu_seqlens"], most, -1) for item in items])
        return batch

    def _length_of(self, items: Sequence[dict[str, Tensor]]) -> int:
        longest = max(len(item["tokens"]) for item in items)
        rounded = math.ceil(longest / self.multiple) * self.multiple
        return max(longest, rounded if self.at_most is None else min(rounded, self.at_most))


def _filled(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=value)


def _counted_on(positions: Tensor, length: int) -> Tensor:
    """Positions that restart in the padding: it is a separate sequence in a pack, and the number of learned
    positions is limited."""
    return torch.cat([positions, torch.arange(length - len(positions))])
