# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's settings of gradient buffers and optimizer, remembering what they were made with, under both spellings.

``DistributedDataParallelConfig(overlap_grad_reduce=False)`` sets a field to its default. Whoever decides defaults later has
to know that it was set all the same; Megatron-Core's dataclasses forget it. `remember_arguments` makes the calls of these
classes remember, and gives `DistributedDataParallelConfig` the names of NeMo's documents beside Megatron-Core's.
"""

from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo2.config.aliases import NOT_HERE, aliases_of, register_elsewhere
from nemo2.config.capture import configurable, is_configurable

__all__ = ["DistributedDataParallelConfig", "OptimizerConfig", "remember_arguments"]


def _set_on_the_buffers(strategy: Any) -> Any:
    """``use_distributed_optimizer`` of the gradient buffers, where it was set there: one switch in two configurations."""
    given = getattr(getattr(strategy, "ddp", None), "__arguments__", {})
    return given.get("use_distributed_optimizer", NOT_HERE)


_DDP = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_OPTIMIZER = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
register_elsewhere(
    _DDP,
    "optim.config",
    use_distributed_optimizer=lambda config: getattr(config, "use_distributed_optimizer", NOT_HERE),
)
register_elsewhere(_OPTIMIZER, "trainer.strategy", use_distributed_optimizer=_set_on_the_buffers)


def remember_arguments() -> None:
    """Once per process, before such configurations are made; made earlier, they count as set where they differ from their
    defaults. Fields, equality, copies and signatures stay what they are."""
    for cls in (DistributedDataParallelConfig, OptimizerConfig, *OptimizerConfig.__subclasses__()):
        if not is_configurable(cls):
            configurable(cls)
        for alias, name in aliases_of(cls).items():
            if not hasattr(cls, alias):
                setattr(cls, alias, _second_name(name))


def _second_name(name: str) -> property:
    """Without it, setting the other spelling on an object would make an attribute that nobody reads."""

    def get(self: Any) -> Any:
        return getattr(self, name)

    def set(self: Any, value: Any) -> None:
        setattr(self, name, value)

    return property(get, set, doc=f"Second spelling of ``{name}``.")


remember_arguments()
