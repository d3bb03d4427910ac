# SPDX-License-Identifier: Apache-2.0
"""Loads released weights directly into a model: each rank reads only its own slices."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError
from nemo2.base.names import listed
from nemo2.checkpoint.paths import folder_of
from nemo2.checkpoint.shards import Shard
from nemo2.hugging_face.released import Released, open_released
from nemo2.models.conversion.table import Entry


def fill(shards: Iterable[Shard], released: Released, *, also: Iterable[str] = ()) -> None:
    """Fill each shard from the release. Only the needed parts of the files are read.

    Args:
        shards: This rank's shards of the model, by the keys of its checkpoints.
        also: Keys of shards that a model_transform has added. No release has them, and they stay unchanged.

    Raises:
        CheckpointError: the release lacks some shards, or has them in other sizes. The message lists all, and no shard
            was changed.
    """
    # For stacked and for separate layers, and by their indices on the stacked axes.
    by_key: dict[str, dict[tuple[int, ...], Entry]] = {}
    for entry in released.entries:
        for one in (entry, entry.by_layer):
            by_key.setdefault(one.key, {})[one.at] = one
    left_out = set(also)
    wanted = [shard for shard in shards if shard.key not in left_out]
    if problems := list(_problems(wanted, by_key, released)):
        raise CheckpointError(
            f"{released.folder} does not fit this model: {listed(problems, separator='; ')}. Check model.config."
        )
    with torch.no_grad():
        for shard in wanted:
            for part, entry, rows, columns in _parts(shard, by_key[shard.key]):
                filled = 0
                for start, values in released.part(entry, rows, columns):
                    first = start - rows.start
                    part[first : first + len(values)].copy_(values)
                    filled = first + len(values)
                if filled < part.shape[0]:  # rows that only pad the vocabulary
                    part[filled:].zero_()


def _problems(
    shards: Iterable[Shard], by_key: dict[str, dict[tuple[int, ...], Entry]], released: Released
) -> Iterator[str]:
    for key, shard in {shard.key: shard for shard in shards}.items():
        entries = by_key.get(key)
        if entries is None:
            yield f"{key} has no counterpart in {released.conversion.architectures[0]}"
            continue
        at, entry = next(iter(entries.items()))
        here, there = shard.global_shape[len(at) :], entry.own_shape
        if here == there or (entry.vocabulary and here[1:] == there[1:] and here[0] > there[0]):
            continue
        yield f"{key} has shape {list(here)} in the model, and {list(there)} in the release"
        if entry.vocabulary and here[0] < there[0]:
            yield f"set model.config.vocab_size={there[0]} for {entry.key.removeprefix('module.')}"


def _parts(shard: Shard, entries: dict[tuple[int, ...], Entry]) -> Iterator[tuple[torch.Tensor, Entry, slice, slice]]:
    """The parts of a shard, one per layer and expert: the destination, the entry, and its rows and columns."""
    stacked = len(next(iter(entries)))
    offset, shape = shard.offset[stacked:], tuple(shard.tensor.shape)[stacked:]
    rows = slice(offset[0], offset[0] + shape[0])
    columns = slice(offset[1], offset[1] + shape[1]) if len(shape) > 1 else slice(None)
    for index in itertools.product(*(range(size) for size in shard.tensor.shape[:stacked])):
        at = tuple(first + one for first, one in zip(shard.offset, index, strict=False))
        yield shard.tensor[index], entries[at], rows, columns


def start_from(
    path: str, *, config: Any, shards: Iterable[Shard], also: Iterable[str] = (), downloads: bool = True
) -> None:
    """Fill a model with the weights at ``path``. Every rank must call it with its own shards.

    Args:
        path: As in `folder_of`.
        config: nemo2's configuration of the model.
        shards, also: As in `fill`.
        downloads: Whether this rank downloads for its machine.

    Raises:
        CheckpointError: on every rank, if a rank can't read its part or the weights don't fit.
        ConfigError: see `folder_of` and `open_released`.
        SecurityError: see `folder_of` and `open_released`.
    """
    ranks.together(lambda: folder_of(path) if downloads else None, error=CheckpointError)
    ranks.together(
        lambda: fill(shards, open_released(folder_of(path, local_files_only=True), config), also=also),
        error=CheckpointError,
    )
