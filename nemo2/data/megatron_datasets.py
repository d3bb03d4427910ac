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

from nemo2.data.index_cache import guarded, rebuilding
from nemo2.data.token_reader import read_by_position
from nemo2.errors import DataError, Nemo2Error

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

    first = None
    if _rank() == 0 or not _distributed():
        first = on_all_ranks(lambda: _explained(lambda: rebuilding(build, config.path_to_cache), "built"))
    else:
        on_all_ranks(lambda: None)  # rank 0 is building; receive the outcome
    datasets = on_all_ranks(lambda: first if first is not None else _explained(read, "read"))
    for dataset in datasets:
        read_by_position(dataset)
    return {split: dataset for split, dataset in zip(_SPLITS, datasets, strict=True) if dataset is not None}


def on_all_ranks(work: Callable[[], T], *, on_rank_0_only: bool = False) -> T:
    """Call `work` on every rank and return its result. If it fails on any rank, every rank raises the error of the
    first failing rank.

    With `on_rank_0_only`, the other ranks get rank 0's result, which must be picklable. Without a process group there
    is one rank. nemo2's errors are raised unchanged on every rank. Another error is raised unchanged on its own rank,
    and as a `DataError` on the others.
    """
    result: Any = None
    error: Optional[Exception] = None
    if not on_rank_0_only or _rank() == 0:
        try:
            result = work()
        except Exception as caught:  # any error: the other ranks must receive it first
            error = caught
    if _distributed():
        verdicts: list[Any] = [None] * dist.get_world_size()
        sent = result if on_rank_0_only else None
        failure = None if error is None else (type(error).__name__, str(error), isinstance(error, Nemo2Error))
        dist.all_gather_object(verdicts, (failure, sent))
        if error is None:
            for rank, (failure, _) in enumerate(verdicts):
                if failure is not None:
                    name, text, ours = failure
                    raise DataError(f"{text} (found by rank {rank})" if ours else f"Rank {rank} failed: {name}: {text}")
        if on_rank_0_only:
            result = verdicts[0][1]
    if error is not None:
        raise error
    return result


class _LocalBuilder(BlendedMegatronDatasetBuilder):
    """Megatron-Core's builder on this rank only, without barriers."""

    @staticmethod
    def build_generic_dataset(
        cls: Any,  # pyright: ignore[reportSelfClsParameterName]  # upstream's name
        is_built_on_rank: Any,
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        if cls is BlendedDataset and not _distributed():
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


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0
