# SPDX-License-Identifier: Apache-2.0
"""Facts of the world of ranks that strategies ask for: timeout, seed, and how a plain loader's data is split."""

import logging
import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

_log = logging.getLogger(__name__)
DEFAULT_SEED = 1234
"""Megatron-LM's default. ``lightning.seed_everything`` sets another."""


def collective_timeout() -> timedelta:
    """The longest time of a collective: the variable TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, as in NeMo, else torch's 30
    minutes."""
    seconds = os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    return timedelta(seconds=int(seconds)) if seconds else timedelta(minutes=30)


def data_parallel_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_world_size()


def with_own_generator(dataloader: Any) -> Any:
    """The loader with its own random generator.

    A loader draws a number each time it is iterated. On a CPU torch's default generator also feeds dropout, and a
    resumed run iterates at other steps than an uninterrupted one.
    """
    if isinstance(dataloader, DataLoader) and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(run_seed())
    return dataloader


def warn_of_equal_data(dataloader: Any, trainer: pl.Trainer) -> None:
    """Warn about a plain loader without a data sampler and with Lightning's sampler switched off, because nothing
    splits its data."""
    plain = isinstance(dataloader, DataLoader) and isinstance(dataloader.sampler, (SequentialSampler, RandomSampler))
    if plain and not trainer._accelerator_connector.use_distributed_sampler and data_parallel_size() > 1:
        _log.warning(
            "trainer.use_distributed_sampler=False, and the data has neither a data_sampler nor a distributed sampler: all %d "
            "data-parallel replicas train on the same samples. Set trainer.use_distributed_sampler=True, or give the data "
            "module a MegatronDataSampler.",
            data_parallel_size(),
        )


def run_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))
