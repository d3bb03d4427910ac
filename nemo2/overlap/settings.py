# SPDX-License-Identifier: Apache-2.0
"""The input and output of the overlap rules: the user's settings, the run's facts, the decisions."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

from nemo2.config.derivations import Setting
from nemo2.overlap.tp_switches import SWITCHES

CALLBACK = "MegatronCommOverlapCallback"

MODEL_FIELDS = (
    "tp_comm_overlap",
    "tp_comm_overlap_cfg",
    "tp_comm_bootstrap_backend",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
)
DDP_FIELDS = ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size")
OPTIMIZER_FIELDS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")
CALLBACK_FIELDS = tuple(dict.fromkeys((*MODEL_FIELDS, *DDP_FIELDS, *OPTIMIZER_FIELDS)))
"""Every argument of the callback, once."""
SWITCH_FIELDS = tuple(SWITCHES)
"""Fields of the model's configuration that are no arguments of the callback. They follow from
``tp_comm_overlap_cfg``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapFacts:
    """Facts of a run that the overlap rules read."""

    tensor_parallel: int
    """Tensor-parallel ranks."""
    pipeline_parallel: int
    """Pipeline stages."""
    virtual_pipeline: Optional[int]
    """Chunks per pipeline stage. None or 1: stages are not divided."""
    context_parallel: int = 1
    """Context-parallel ranks."""
    gradient_ranks: int
    """Ranks that reduce gradients together: data parallel times context parallel."""
    sequence_parallel: bool
    """Whether activations between matrix products are sharded over the tensor-parallel ranks."""
    distributed_optimizer: bool
    """Whether the optimizer state is sharded over the data-parallel ranks."""
    fused_weight_gradients: bool
    """Whether ``gradient_accumulation_fusion`` is on and the output layer's kernel for it is available."""
    transformer_engine_missing: Optional[str]
    """The reason why Transformer Engine is unavailable. None: it is available."""
    without_buffers: Optional[str] = None
    """The reason why some of the model's projections have no userbuffers. None: all projections have them."""
    context_messages: str = "p2p"
    """``model.config.cp_comm_type``: how context-parallel ranks exchange keys and values."""
    always_overlapped: tuple[str, ...] = ()
    """Fields of the gradient buffers that Megatron-FSDP switches on itself. Empty without Megatron-FSDP."""
    not_overlapped: Optional[str] = None
    """Why Megatron-FSDP may not overlap the reduction of gradients. None: it may, or there is no Megatron-FSDP."""
    gpu: Optional[str] = None
    """"h100", "b200" and so on (`nemo2.gpus.model_of`). None: no known GPU."""
    quantized: Optional[str] = None
    """``model.config.fp8``. None: no fp8."""
    hidden_size: Optional[int] = None
    """The model's hidden size. None: unknown."""
    micro_batch_size: Optional[int] = None
    """Sequences per forward. None: unknown."""
    seq_length: Optional[int] = None
    """Tokens per sequence. None: unknown."""

    @property
    def interleaved(self) -> bool:
        return self.pipeline_parallel > 1 and (self.virtual_pipeline or 1) > 1


class Decision(NamedTuple):
    """The value of a field, and the reason. ``by_user`` tells whether the value is the user's rather than a default."""

    value: Any
    reason: str
    by_user: bool = False


class Requested:
    """The user's settings by field, as the rows of `nemo2.overlap.conflicts` read them, with the facts of the run. Two
    equal settings of one field count as one.

    ``facts`` are those that rows about pipelines read. ``clashes`` has a sentence for each pair that differs.
    """

    def __init__(self, settings: Iterable[Setting], facts: Optional[OverlapFacts] = None) -> None:
        if facts is not None:
            self.pipeline_parallel, self.interleaved = facts.pipeline_parallel, facts.interleaved
            self._sizes = {
                "pipeline_model_parallel_size": facts.pipeline_parallel,
                "virtual_pipeline_model_parallel_size": facts.virtual_pipeline,
            }
        self._by_name: dict[str, Setting] = {}
        self.clashes: list[str] = []
        for setting in settings:
            first = self._by_name.setdefault(setting.name, setting)
            if first is not setting and not same(first.value, setting.value):
                self.clashes.append(
                    f"{first} contradicts {setting}. Both control the same setting. Remove one of them, or set both "
                    "to the same value."
                )

    def requested(self, field: str) -> Optional[Setting]:
        """The setting of a field ("model.config.overlap_p2p_comm"), wherever it was set."""
        return self._by_name.get(field.rpartition(".")[2])

    get = requested

    def in_force(self, field: str) -> Setting:
        owner, _, name = field.rpartition(".")
        return Setting(name, owner, self._sizes[name])


def same(left: Any, right: Any) -> bool:
    """Whether two settings are equal. A dataclass of userbuffer settings equals a dict with the same values."""
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        left = dataclasses.asdict(left)
    if dataclasses.is_dataclass(right) and not isinstance(right, type):
        right = dataclasses.asdict(right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return dict(left) == dict(right)
    return type(left) is type(right) and left == right
