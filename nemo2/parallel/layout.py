# SPDX-License-Identifier: Apache-2.0
"""The sizes that say how a model is cut, and their arithmetic.

A world of ranks is the product ``tp * cp * pp * dp`` for the dense layers and ``etp * ep * pp * expert_dp`` for the experts
(Megatron-Core ``parallel_state.initialize_model_parallel``). The sizes a user sets are all but ``dp``, which follows from
the world.
"""

from dataclasses import dataclass
from typing import Any, Optional, Union

from nemo2.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes by the short names that everybody draws."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a slice of every weight matrix."""
    pp: int = 1
    """Pipeline stages."""
    vp: Optional[int] = None
    """Virtual stages (model chunks) per pipeline rank. None: the schedule isn't interleaved."""
    cp: int = 1
    """Context-parallel ranks: each holds a slice of every sequence."""
    ep: int = 1
    """Expert-parallel ranks: each holds a share of the experts."""
    etp: Optional[int] = None
    """Tensor-parallel ranks inside an expert. None: the same as ``tp``, as Megatron-Core takes it."""
    sp: bool = False
    """Sequence parallel: between the matrix products the sequence is cut over the tensor-parallel ranks."""

    def __post_init__(self) -> None:
        problems = self.size_problems(**{name: getattr(self, name) for name in SIZE_FIELDS})
        if problems:
            raise ConfigError("\n".join(problems))

    @staticmethod
    def size_problems(**sizes: Any) -> list[str]:
        """One sentence for each of the sizes, by their short names, that is no whole number of at least 1."""
        return [
            f"strategy.{SIZE_FIELDS[name]}={value!r}: must be a whole number of at least 1."
            for name, value in sizes.items()
            if not (value is None and name in ("vp", "etp"))
            and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
        ]

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the dense model: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    @property
    def expert_tensor_size(self) -> int:
        return self.tp if self.etp is None else self.etp

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model in a world.

        Raises:
            ConfigError: the world isn't a multiple of ``tp * pp * cp``, or of ``etp * ep * pp`` where experts are cut.
        """
        problem = self.world_problem(world_size)
        if problem:
            raise ConfigError(problem)
        return world_size // self.model_parallel_size

    def world_problem(self, world_size: int) -> Optional[str]:
        """Why this layout can't be laid over ``world_size`` ranks; None if it can."""
        size = self.model_parallel_size
        if world_size % size:
            up = -(-world_size // size) * size
            return (
                f"tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = "
                f"{self.tp} * {self.pp} * {self.cp} = {size} does not divide the world of {world_size} "
                f"rank{'s' if world_size > 1 else ''}; run on {up} ranks (or another multiple of {size}), or use a smaller "
                "layout."
            )
        expert = self.expert_tensor_size * self.ep * self.pp
        if world_size % expert:
            origin = (
                "" if self.etp is not None else " (expert_tensor_parallel_size is unset and so equals the tensor size)"
            )
            return (
                f"expert_tensor_parallel_size * expert_model_parallel_size * pipeline_model_parallel_size = "
                f"{self.expert_tensor_size} * {self.ep} * {self.pp} = {expert}{origin} does not divide the world of "
                f"{world_size} ranks; run on a multiple of {expert}, or use fewer expert ranks."
            )
        return None

    def describe(self, world_size: Optional[int] = None) -> str:
        """One line, e.g. ``TP 2 (SP) · PP 4 x VP 2 · CP 2 · DP 8``, sizes of one left out."""
        parts = [f"TP {self.tp}" + (" (SP)" if self.sp else "")] if self.tp > 1 else []
        if self.pp > 1:
            parts.append(f"PP {self.pp}" + (f" x VP {self.vp}" if self.vp and self.vp > 1 else ""))
        parts += [f"{label} {size}" for label, size in (("CP", self.cp), ("EP", self.ep)) if size > 1]
        if self.ep > 1 and self.etp is not None and self.etp != self.tp:
            parts.append(f"ETP {self.etp}")
        if world_size is not None and world_size % self.model_parallel_size == 0:
            parts.append(f"DP {world_size // self.model_parallel_size}")
        return " · ".join(parts) or "one rank"


@dataclass
class ParallelismConfig:
    """The strategy's sizes under the names of the model configuration's fields, where they are written to."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: Optional[int]
    context_parallel_size: int
    sequence_parallel: bool
    expert_model_parallel_size: int
    expert_tensor_parallel_size: Optional[int]
    pipeline_dtype: Optional[Any]
    """A torch dtype; this module doesn't import torch."""
    microbatch_group_size_per_vp_stage: Optional[int]
    num_layers_in_first_pipeline_stage: Optional[int]
    num_layers_in_last_pipeline_stage: Optional[int]
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    pipeline_model_parallel_layout: Optional[Union[str, list]]
    pipeline_model_parallel_comm_backend: Optional[str]
    use_te_rng_tracker: bool


SIZE_FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""The strategy's (and Megatron-Core's) names of the sizes."""
