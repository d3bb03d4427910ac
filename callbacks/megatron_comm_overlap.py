# SPDX-License-Identifier: Apache-2.0
"""Overlaps communication with computation as far as the layout allows. The rules are in `nemo2.mcore.settle.overlap`."""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Optional, Union

import lightning.pytorch as pl

from nemo2.base.errors import ConfigError
from nemo2.callbacks.consumption import sampler_of
from nemo2.config.capture import configurable
from nemo2.mcore.overlap.tp_overlap_cfg import TransformerLayerTPOverlapCfg
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.overlap import CALLBACK, Decision, arguments_of, overlap

_log = logging.getLogger(__name__)


@configurable
class MegatronCommOverlapCallback(pl.Callback):
    """Overlap tensor-, pipeline- and data-parallel communication with computation, as far as the layout allows.

    In ``setup`` the callback writes the model's configuration, ``strategy.ddp_config`` and the optimizer's
    configuration, before any of them is used. The strategy then starts Transformer Engine's userbuffers before it
    builds the first layer. The callback costs nothing per step and behaves the same on every rank.

    An argument of None follows the rules of `nemo2.mcore.settle.overlap`. A value that was set explicitly on a
    configuration stays.

    A trainer with several of these callbacks treats them as one callback with the arguments of all.

    Args:
        tp_comm_overlap: Overlap tensor-parallel communication with matrix products. Needs tensor and sequence
            parallelism and Transformer Engine. Without them it is off, and the run reports this once.
        tp_comm_overlap_cfg: Userbuffer settings per GEMM, as a `TransformerLayerTPOverlapCfg` or a dict of its values;
            the name of a preset; "auto" or None for the preset tuned for this GPU, model and layout, if there is one;
            or "default" for Transformer Engine's own settings.
        tp_comm_bootstrap_backend: The backend with which ranks exchange the buffers' addresses.
        overlap_p2p_comm: Overlap the communication between pipeline stages. None: with virtual stages.
        batch_p2p_comm: Send and receive between pipeline stages in one batched call. None: without virtual stages.
        overlap_grad_reduce: Overlap the data-parallel reduction of gradients with the backward.
        overlap_param_gather: Overlap the gather of updated parameters with the next forward. Needs the distributed
            optimizer.
        overlap_param_gather_with_optimizer_step: Overlap the gather of the first bucket with the optimizer step. Needs
            the distributed optimizer.
        align_param_gather: Start the gathers of all pipeline stages at the same time.
        bucket_size: Elements per bucket of the data-parallel buffers.
        defer_embedding_wgrad_compute: Move the output layer's weight gradient into the pipeline's drain phase. Needs
            several stages and gradient accumulation fusion.
        wgrad_deferral_limit: The number of micro-batches whose weight gradient of the output layer is deferred. 0: all
            of them.

    Raises:
        ConfigError: settings contradict each other, or the strategy is not MegatronStrategy.
    """

    asks_for_overlap: ClassVar[bool] = True
    """Marks callbacks whose arguments are settings of `nemo2.mcore.settle.overlap`, which can't import this module."""

    def __init__(
        self,
        tp_comm_overlap: Optional[bool] = None,
        tp_comm_overlap_cfg: Optional[Union[TransformerLayerTPOverlapCfg, dict[str, Any], str]] = None,
        tp_comm_bootstrap_backend: Optional[Literal["nccl", "mpi", "gloo"]] = None,
        overlap_p2p_comm: Optional[bool] = None,
        batch_p2p_comm: Optional[bool] = None,
        overlap_grad_reduce: Optional[bool] = None,
        overlap_param_gather: Optional[bool] = None,
        overlap_param_gather_with_optimizer_step: Optional[bool] = None,
        align_param_gather: Optional[bool] = None,
        bucket_size: Optional[int] = None,
        defer_embedding_wgrad_compute: Optional[bool] = None,
        wgrad_deferral_limit: Optional[int] = None,
    ):
        self.tp_comm_overlap = tp_comm_overlap
        self.tp_comm_overlap_cfg = tp_comm_overlap_cfg
        self.tp_comm_bootstrap_backend = tp_comm_bootstrap_backend
        self.overlap_p2p_comm = overlap_p2p_comm
        self.batch_p2p_comm = batch_p2p_comm
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.overlap_param_gather_with_optimizer_step = overlap_param_gather_with_optimizer_step
        self.align_param_gather = align_param_gather
        self.bucket_size = bucket_size
        self.defer_embedding_wgrad_compute = defer_embedding_wgrad_compute
        self.wgrad_deferral_limit = wgrad_deferral_limit
        self._decisions: dict[str, Decision] = {}

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """Each field's value from ``setup``, with the reason. Empty before ``setup``, and on all but the first of
        several such callbacks."""
        return dict(self._decisions)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if not isinstance(getattr(strategy, "layout", None), Layout):
            raise ConfigError(
                f"{CALLBACK} requires MegatronStrategy, but trainer.strategy is a {type(strategy).__name__}. Remove "
                "the callback from trainer.callbacks."
            )
        if not hasattr(strategy, "ddp_config"):
            # Torch shards the model and overlaps its gathers and reductions itself. No tensor is sharded over
            # tensor-parallel ranks.
            if trainer.is_global_zero:
                name = type(strategy).__name__
                _log.info("%s has no effect under %s.", CALLBACK, name)
                for setting in arguments_of(self):
                    _log.warning("%s does not take effect: %s overlaps communication by itself.", setting, name)
            return
        siblings = [
            one for one in getattr(trainer, "callbacks", [self]) if isinstance(one, MegatronCommOverlapCallback)
        ]
        if siblings and siblings[0] is not self:
            return
        said = bool(self._decisions) or not trainer.is_global_zero
        self._decisions = overlap(
            strategy.run_settings(pl_module),
            siblings or [self],
            world_size=trainer.world_size,
            data_sampler=sampler_of(trainer),
            say=None if said else _log.warning,
        )
