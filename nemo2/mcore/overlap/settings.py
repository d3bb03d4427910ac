# SPDX-License-Identifier: Apache-2.0
"""The input and output of the overlap rules: the facts of a run, and the decisions."""

import dataclasses
from typing import Any, NamedTuple, Optional

from nemo2.mcore.parallel.layout import Layout

CALLBACK = "MegatronCommOverlapCallback"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapFacts:
    """Facts of a run that the overlap rules read."""

    layout: Layout
    """The parallel sizes."""
    gradient_ranks: int
    """Ranks that reduce gradients together: data parallel times context parallel."""
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
    """"h100", "b200" and so on (`nemo2.base.gpus.model_of`). None: no known GPU."""
    quantized: Optional[str] = None
    """``model.config.fp8``. None: no fp8."""
    hidden_size: Optional[int] = None
    """The model's hidden size. None: unknown."""
    micro_batch_size: Optional[int] = None
    """Sequences per forward. None: unknown."""
    seq_length: Optional[int] = None
    """Tokens per sequence. None: unknown."""


class Decision(NamedTuple):
    """The value of a field, and the reason. ``by_user`` tells whether the value is the user's rather than a default."""

    value: Any
    reason: str
    by_user: bool = False
