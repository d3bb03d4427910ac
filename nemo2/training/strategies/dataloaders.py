# SPDX-License-Identifier: Apache-2.0
"""What a strategy does to plain loaders, which no Megatron data sampler splits."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from nemo2.mcore.parallel.groups import run_seed

_log = logging.getLogger(__name__)


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
    if not plain or trainer._accelerator_connector.use_distributed_sampler:
        return
    replicas = parallel_state.get_data_parallel_world_size()
    if replicas > 1:
        _log.warning(
            "trainer.use_distributed_sampler=False, and the data has neither a data_sampler nor a distributed sampler: all %d "
            "data-parallel replicas train on the same samples. Set trainer.use_distributed_sampler=True, or give the data "
            "module a MegatronDataSampler.",
            replicas,
        )
