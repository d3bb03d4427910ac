# SPDX-License-Identifier: Apache-2.0
"""Detects replicas whose parameters differ."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from nemo2.base import ranks
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.config.capture import configurable
from nemo2.mcore.parallel.inspection import named_parameters

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@configurable
class DdpParityChecker(pl.Callback):
    """Compare the parameters of all data-parallel replicas bit by bit, at an interval and at the end of training.

    A check reads each parameter once to compute two sums over its bits, one of them weighted by position. Ranks then
    gather two numbers per parameter. Steps without a check cost nothing. Parameters whose gather overlaps with the
    forward are gathered before the check.

    Args:
        interval: Steps between two checks. 0: check only at the end of training.

    Raises:
        ConfigError: a negative interval, or parameters that are sharded over the ranks and so have no replicas.
        RuntimeFault: during training, if replicas differ. The message names the parameters and the ranks.
    """

    def __init__(self, interval: int = 0) -> None:
        require_counts("DdpParityChecker", least=0, interval=interval)
        self.interval = interval

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sharded = next(
            (name for name, parameter in named_parameters(trainer) if hasattr(parameter, "placements")), None
        )
        if sharded is not None:
            raise ConfigError(
                f"DdpParityChecker: {sharded} is sharded over the data-parallel ranks, so there are no replicas to "
                "compare. Remove the callback."
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.interval and trainer.global_step % self.interval == 0:
            _compare(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _compare(trainer)


def _compare(trainer: Any) -> None:
    parallel = getattr(trainer.strategy, "megatron_parallel", None)
    if parallel is not None:
        parallel.force_param_sync()
    place, expert_place = _replica_groups(trainer)
    mine = {
        (expert_place if not getattr(parameter, "allreduce", True) else place, name): _bits(parameter)
        for name, parameter in named_parameters(trainer)
    }
    seen: dict[Any, tuple[Any, int]] = {}
    differing: dict[str, set[int]] = {}
    for rank, fingerprints in enumerate(ranks.gather(mine)):
        for key, bits in fingerprints.items():
            first, where = seen.setdefault(key, (bits, rank))
            if first != bits:
                differing.setdefault(key[1], {where}).add(rank)
    if differing:
        listed = "; ".join(f"{name} on ranks {sorted(ranks)}" for name, ranks in list(differing.items())[:5])
        raise RuntimeFault(
            f"After step {trainer.global_step}, data-parallel replicas differ in {len(differing)} parameters: {listed}. "
            "They received different gradients or started from different weights, so the replicas no longer form one "
            "model since the last check. Resume from a checkpoint before that check."
        )


def _replica_groups(trainer: Any) -> tuple[Any, Any]:
    """The part of the dense and of the expert parameters on this rank. Ranks with equal values are replicas."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return (0,), (0,)
    stage = state.get_pipeline_model_parallel_rank()
    dense = ("dense", stage, state.get_tensor_model_parallel_rank())
    experts = ("experts", stage, state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank())
    return dense, experts


def _bits(parameter: Tensor) -> tuple[int, int]:
    """Two sums over a tensor's bits, modulo 2**64. The second weights each element by its position."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = parameter.detach().reshape(-1).view(kinds[parameter.element_size()]).to(torch.int64)
    places = torch.arange(1, values.numel() + 1, device=values.device) * _ODD
    return int(values.sum()), int((values * places).sum())
