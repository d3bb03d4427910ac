# SPDX-License-Identifier: Apache-2.0
"""The configurations of a run whose settings depend on each other, as the rows of `nemo2.mcore.settle.rows` read them."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any, Optional

from nemo2.config.derivations import Setting
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_fields, where_set
from nemo2.config.walk import class_of
from nemo2.mcore.parallel.cuda_graphs import kind_of
from nemo2.mcore.parallel.layout import Layout, ParallelismConfig
from nemo2.mcore.precision import MegatronMixedPrecision
from nemo2.mcore.settle.machine import Machine

STRATEGY, DDP, OPTIM, MODEL = "strategy", "strategy.ddp_config", "optim.config", "model.config"
PLUGINS = "trainer.plugins"
OVERLAP_RULE = "overlap-is-asked-for-once"
_DERIVED = {
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "microbatch_group_size_per_vp_stage": "pipeline_model_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The objects of a run whose settings depend on each other.

    Objects may be None, or of classes that are neither Megatron-Core's nor nemo2's. Such objects are left unchanged.

    Attributes:
        machine: the machine of the run.
    """

    parallelism: ParallelismConfig
    ddp_config: Any = None
    optimizer_config: Any = None
    model_config: Any = None
    precision: Any = None
    machine: Machine = Machine()

    def copied(self, machine: Machine) -> "RunSettings":
        """Copies of the objects, on ``machine``."""
        precision = self.precision
        if isinstance(precision, MegatronMixedPrecision):
            precision = copy.copy(precision)
            precision.dtype_config = copy.copy(precision.dtype_config)
        return replace(
            self,
            parallelism=copy.copy(self.parallelism),
            ddp_config=copy.copy(self.ddp_config),
            optimizer_config=_copied(self.optimizer_config),
            model_config=_copied(self.model_config),
            precision=precision,
            machine=machine,
        )

    def objects(self) -> dict[str, Any]:
        """The configurations by their path in a recipe."""
        paths = {STRATEGY: "trainer.strategy", DDP: "trainer.strategy.ddp"}
        return {paths.get(name, name): config for name, config in self.configs.items() if is_dataclass(config)}

    @property
    def configs(self) -> dict[str, Any]:
        """The configurations by the names that rows and errors call them. None: the run has no such configuration."""
        return {
            STRATEGY: self.parallelism,
            DDP: self.ddp_config,
            OPTIM: self.optimizer_config,
            MODEL: self.model_config,
            PLUGINS: self.dtypes,
        }

    def __getitem__(self, field: str) -> Any:
        """The value of a field ("model.config.bf16"). None: the run has no such configuration or field."""
        return getattr(*self._at(field), None)

    def explicit(self, field: str) -> bool:
        """Whether the user set a field."""
        config, name = self._at(field)
        return name in (self._explicit_of_model if config is self.model_config else explicit_fields(config))

    def in_force(self, field: str) -> Setting:
        config, name = self._at(field)
        return Setting(name, field.rpartition(".")[0], self[field], where_set(config, name))

    def requested(self, field: str) -> Optional[Setting]:
        return self.in_force(field) if self[field] is not None and self.explicit(field) else None

    def adjust(self, field: str, value: Any, why: str) -> None:
        config, name = self._at(field)
        if hasattr(config, name):
            adjust(config, name, value, why=why)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.parallelism)

    @property
    def dtypes(self) -> Any:
        """The precision's. None: the precision is not nemo2's."""
        return getattr(self.precision, "dtype_config", None)

    @property
    def graphs(self) -> str:
        """The kind of CUDA graphs."""
        return kind_of(self.model_config)

    def _at(self, field: str) -> tuple[Any, str]:
        owner, _, name = field.rpartition(".")
        return self.configs[owner], name

    @cached_property
    def _explicit_of_model(self) -> frozenset[str]:
        """Without the fields that Megatron-Core derived from other sizes: a plain TransformerConfig doesn't distinguish
        these from explicit ones."""
        config = self.model_config
        return explicit_fields(config) - {
            name for name, other in _DERIVED.items() if getattr(config, name, None) == getattr(config, other, None)
        }


def _copied(config: Any) -> Any:
    return copy.copy(config) if is_dataclass(config) else config


def overlap_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """The overlap callbacks among a trainer's, as configs or live objects."""
    return [callback for callback in callbacks if getattr(class_of(callback), "asks_for_overlap", False)]
