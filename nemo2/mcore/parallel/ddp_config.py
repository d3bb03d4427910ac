# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's configurations of gradient buffers and optimizer, with a record of their arguments and both names of
each field.

``DistributedDataParallelConfig(overlap_grad_reduce=False)`` sets a field to its default. Code that decides defaults
later must know that the field was set, which Megatron-Core's dataclasses don't record. `remember_arguments` makes these
classes record their arguments, and gives `DistributedDataParallelConfig` the names in NeMo's documents beside
Megatron-Core's.
"""

from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo2.config.aliases import NOT_HERE, register_elsewhere
from nemo2.config.capture import configurable, is_configurable

__all__ = ["DistributedDataParallelConfig", "OptimizerConfig", "remember_arguments"]

NOTHING_TO_GATHER_AHEAD = "without overlapped reduction there is only one bucket, so no bucket can be gathered ahead"


def _set_on_the_buffers(strategy: Any) -> Any:
    """``use_distributed_optimizer`` of the gradient buffers, if it was set there. The switch is in two
    configurations."""
    arguments = getattr(getattr(strategy, "ddp", None), "__arguments__", {})
    return arguments.get("use_distributed_optimizer", NOT_HERE)


_DDP = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_OPTIMIZER = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
register_elsewhere(
    _DDP,
    "optim.config",
    use_distributed_optimizer=lambda config: getattr(config, "use_distributed_optimizer", NOT_HERE),
)
register_elsewhere(
    _DDP, "model.config", delay_wgrad_compute=lambda config: getattr(config, "delay_wgrad_compute", NOT_HERE)
)
register_elsewhere(
    _OPTIMIZER,
    "trainer.strategy",
    use_distributed_optimizer=_set_on_the_buffers,
    overlap_param_gather=lambda strategy: getattr(getattr(strategy, "ddp", None), "overlap_param_gather", NOT_HERE),
)


def remember_arguments() -> None:
    """Make the classes record their arguments, once per process, before such configurations are made.

    In configurations made earlier, fields that differ from their defaults count as set. Fields, equality, copies and
    signatures don't change.
    """
    for cls in (DistributedDataParallelConfig, OptimizerConfig, *OptimizerConfig.__subclasses__()):
        if not is_configurable(cls):
            configurable(cls)


remember_arguments()
