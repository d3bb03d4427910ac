# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's dataset builder without its hangs: rank 0 builds, all ranks learn the outcome, and the other ranks
read.

Megatron-Core's builder waits at a barrier after each dataset. If a rank fails, the others wait there until a timeout.
Here no rank waits inside the builder: ranks synchronise and exchange their outcomes between building and reading.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional, TypeVar

import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from nemo2 import ranks
from nemo2.data.index_cache import guarded, rebuilding
from nemo2.data.token_reader import read_by_position
from nemo2.errors import DataError

T = TypeVar("T")
_SPLITS = ("train", "validation", "test")  # in the order of megatron.core.datasets.utils.Split


def build_datasets(
    config: GPTDatasetConfig, sizes: Mapping[str, Optional[int]], dataset_cls: Optional[type] = None
) -> dict[str, Dataset]:
    """The splits in `sizes`, each with at least this number of samples (None: all data once). Called on every rank.

    Raises:
        DataError: on every rank, if rank 0 can't build the index or another rank can't read it. A damaged index is
            built again.
    """
    config = _only(config, sizes)
    requested: list[Any] = [sizes.get(split, 0) for split in _SPLITS]

    def build() -> list[Any]:
        builder = _LocalBuilder(dataset_cls or GPTDataset, requested, lambda: True, config)
        return builder._build_blended_dataset_splits()  # `build` would only add asserts that fail for short blends

    def read() -> list[Any]:
        with guarded(config.path_to_cache, by_hash=False):
            return build()

    def work() -> list[Any]:
        if ranks.is_rank_zero():
            return _explained(lambda: rebuilding(build, config.path_to_cache), "built")
        return _explained(read, "read")

    datasets = ranks.in_turn(work, first=ranks.is_rank_zero(), error=DataError)
    for dataset in datasets:
        read_by_position(dataset)
    return {split: dataset for split, dataset in zip(_SPLITS, datasets, strict=True) if dataset is not None}


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
            share if split in sizes else None for split, share in zip(_SPLITS, config.split_matrix, strict=True)
        ]
    elif config.blend_per_split is not None:
        config.blend_per_split = [
            blend if split in sizes else None for split, blend in zip(_SPLITS, config.blend_per_split, strict=True)
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
