# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's dataset builder without its hangs: rank 0 builds, all ranks learn the outcome, and the other ranks
read. Tokens are read by position (`TokenReader`).

Megatron-Core's builder waits at a barrier after each dataset. If a rank fails, the others wait there until a timeout.
Here no rank waits inside the builder: ranks synchronise and exchange their outcomes between building and reading.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional, TypeVar

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader, _FileBinReader, _MMapBinReader
from torch.utils.data import Dataset

from nemo2.base import ranks
from nemo2.base.errors import DataError
from nemo2.data.blend import SPLITS
from nemo2.data.index_cache import guarded, rebuilding

T = TypeVar("T")


def build_datasets(
    config: GPTDatasetConfig, sizes: Mapping[str, Optional[int]], dataset_cls: Optional[type] = None
) -> dict[str, Dataset]:
    """The splits in `sizes`, each with at least this number of samples (None: all data once). Called on every rank.

    Raises:
        DataError: on every rank, if rank 0 can't build the index or another rank can't read it. A damaged index is
            built again.
    """
    config = _only(config, sizes)
    cache = config.path_to_cache
    assert cache is not None, "the data module sets it"
    requested: list[Any] = [sizes.get(split, 0) for split in SPLITS]

    def build() -> list[Any]:
        builder = _LocalBuilder(dataset_cls or GPTDataset, requested, lambda: True, config)
        return builder._build_blended_dataset_splits()  # `build` would only add asserts that fail for short blends

    def read() -> list[Any]:
        with guarded(cache, by_hash=False):
            return build()

    def work() -> list[Any]:
        if ranks.is_rank_zero():
            return _explained(lambda: rebuilding(build, cache), "built")
        return _explained(read, "read")

    datasets = ranks.in_turn(work, first=ranks.is_rank_zero(), error=DataError)
    for dataset in datasets:
        # Object storage keeps its reader.
        for indexed in _indexed(dataset):
            if isinstance(indexed.bin_reader, _MMapBinReader | _FileBinReader):
                indexed.bin_reader = TokenReader(f"{indexed.path_prefix}.bin")
    return {split: dataset for split, dataset in zip(SPLITS, datasets, strict=True) if dataset is not None}


class _LocalBuilder(BlendedMegatronDatasetBuilder):
    """Megatron-Core's builder on this rank only, without barriers."""

    @staticmethod
    def build_generic_dataset(
        cls: Any,  # pyright: ignore[reportSelfClsParameterName]  # upstream's name
        is_built_on_rank: Any,
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        if cls is BlendedDataset and not dist.is_initialized():
            # Version 0.16 needs a process group to cache a blend. Without a group the blend isn't cached; building it
            # is quick.
            *rest, config = args
            config = copy.copy(config)
            config.path_to_cache = None
            args = (*rest, config)
        return cls(*args)

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list[Any], sizes_per_dataset: list[list[Any]]
    ) -> list[list[Any]]:
        with ThreadPoolExecutor(max_workers=max(1, self.config.num_dataset_builder_threads)) as threads:
            work = [
                threads.submit(self._build_megatron_dataset_splits, prefix, split, sizes, False)
                for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True)
            ]
            return [list(of_split) for of_split in zip(*(one.result() for one in work), strict=True)]


def _only(config: GPTDatasetConfig, sizes: Mapping[str, Optional[int]]) -> GPTDatasetConfig:
    """`config` without unneeded splits, because Megatron would count passes over an empty split forever."""
    config = copy.copy(config)
    if config.split_matrix is not None:
        config.split_matrix = [  # pyright: ignore[reportAttributeAccessIssue]  # None is what upstream uses too
            share if split in sizes else None for split, share in zip(SPLITS, config.split_matrix, strict=True)
        ]
    elif config.blend_per_split is not None:
        config.blend_per_split = [
            blend if split in sizes else None for split, blend in zip(SPLITS, config.blend_per_split, strict=True)
        ]
    return config


def _explained(build: Callable[[], T], verb: str) -> T:
    try:
        return build()
    except OSError as error:
        where = "" if verb == "built" else "; all ranks must see the directory in which rank 0 built it"
        raise DataError(
            f"The sample index can't be {verb}: {error}{where}. Set index_mapping_dir to a directory with room, on a "
            "file system that all ranks share."
        ) from error


class TokenReader(_BinReader):
    """Read tokens from a .bin file by position instead of through a memory map. Threads and forked processes may share a
    reader.

    The kernel ends a process with SIGBUS, without a word, if it reads a mapped file beyond its end: a corpus that is
    written again is first truncated. Megatron-Core's reader without a map returns uninitialised memory in this case.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (open as long as the dataset)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """``count`` tokens from the byte ``offset``.

        Raises:
            DataError: the file ends before, or can't be read.
        """
        tokens = np.empty(count, dtype=dtype)
        rest = memoryview(tokens).cast("B") if tokens.size else b""
        try:
            while rest:
                read = os.preadv(self._file.fileno(), [rest], int(offset))
                if not read:
                    raise DataError(
                        f"{self.path} ends at byte {offset}, within tokens that {self.path[:-4]}.idx lists. It was "
                        "truncated while it was read."
                    )
                rest, offset = rest[read:], offset + read
        except OSError as error:
            raise DataError(f"{self.path} can't be read at byte {offset}: {error.strerror}.") from error
        return tokens


def _indexed(dataset: Any) -> Iterator[IndexedDataset]:
    if isinstance(dataset, IndexedDataset):
        yield dataset
        return
    for part in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if part is not None:
            yield from _indexed(part)
