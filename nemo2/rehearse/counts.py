# SPDX-License-Identifier: Apache-2.0
"""Results of a rehearsal as plain data: bytes, messages, arithmetic and the order of work, per kind of rank.

Everything is per optimizer step of the recipe and per rank unless it says otherwise, in bytes and floating-point operations (a
multiply-add counts as two). Needs no torch; `to_dict` gives what `--json` prints.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass(frozen=True, kw_only=True)
class MemoryCount:
    """Bytes alive on the fullest moment of a step that is not the first."""

    parameters: int
    """In the model's dtype, with the padding of Megatron-Core's parameter buffers."""
    gradients: int
    """Megatron-Core's gradient buffers."""
    main_parameters: int
    """The optimizer's own copies, as far as they are not the model's parameters."""
    optimizer_states: int
    buffers: int
    """Module buffers, the micro-batches of the step, and 8-bit copies of weights."""
    activations: Mapping[str, int]
    """Bytes that autograd keeps for the backward pass, by the part of the model that made them."""
    logits: int
    """Output layer and loss, saved or not."""
    messages: int
    """Buffers of collectives that nothing else holds."""
    working: int
    """Everything else alive at that moment: results on their way, gradients of activations."""
    saved_peak: int
    """The most that autograd kept at any moment, logits included; not part of the sum."""
    teacher: int = 0
    """Parameters and buffers of the teacher of a distillation."""

    @property
    def state(self) -> int:
        own = self.parameters + self.gradients + self.main_parameters + self.optimizer_states + self.buffers
        return own + self.teacher

    @property
    def total(self) -> int:
        return self.state + sum(self.activations.values()) + self.logits + self.messages + self.working

    def terms(self) -> dict[str, int]:
        """The summands of `total` by name, largest first; activations are one of them."""
        terms = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "main parameters": self.main_parameters,
            "optimizer states": self.optimizer_states,
            "buffers": self.buffers,
            "activations": sum(self.activations.values()),
            "logits": self.logits,
            "messages": self.messages,
            "working memory": self.working,
            **({"teacher": self.teacher} if self.teacher else {}),
        }
        return dict(sorted(terms.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """All collectives of one kind over one kind of group."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive, or send_receive (a step of a ring)."""
    group: str
    """tensor, data, context, pipeline, expert, expert_tensor, expert_data, embedding, model, world or Megatron-Core's name."""
    ranks: int
    """Size of the group."""
    calls: float
    bytes: float
    """Sum over the calls of the whole buffer: the output of a gather, the input of a scatter or an all-to-all, the message of a
    send. A ring moves (ranks - 1) / ranks of it per rank, an all-reduce twice that."""
    per: str
    """"microbatch": grows with their number. "step": does not."""


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Arithmetic of one kind of kernel."""

    kind: str
    """gemm, grouped_gemm (experts), batched_gemm, attention, scan (Mamba)."""
    phase: str
    """"forward" or "backward"; what is recomputed counts as backward, for that is when it happens."""
    flops: float


@dataclass(frozen=True)
class Event:
    """The forward or backward pass of one micro-batch through one chunk."""

    kind: str
    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """One rank, standing for all of its kind."""

    kind: str
    """"only stage", "first stage", "middle stage" or "last stage"."""
    rank: int
    stage: int
    layers: tuple[int, ...]
    """Decoder layers of each chunk."""
    memory: MemoryCount
    collectives: tuple[CollectiveCount, ...]
    flops: tuple[FlopCount, ...]
    traffic_bytes: Mapping[str, float]
    """Read and written by all other kernels, by phase ("forward", "backward", "optimizer")."""
    timeline: tuple[Event, ...]
    """In the order Megatron-Core's schedule did them, for `num_microbatches_rehearsed`."""
    num_microbatches: int
    num_microbatches_rehearsed: int
    seconds: float
    """How long the rehearsal of this rank took."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the fullest rank fits its GPU."""

    fits: bool
    gpu: str
    capacity: int
    """Bytes that torch sees on the GPU."""
    outside_torch: int
    """Taken by the CUDA context and NCCL."""
    headroom: int
    """Asked to be left free, for fragmentation and what is not modelled."""
    needed: int
    """The fullest rank's `MemoryCount.total` with what is outside of torch."""
    fullest: str
    """The kind of that rank."""
    largest_term: str
    change: Optional[tuple[str, ...]] = None
    """The smallest change found that makes it fit, as overrides; None where it fits, or none was found or looked for."""
    change_needs: Optional[int] = None
    """`needed` after the change."""

    @property
    def free(self) -> int:
        """Bytes left on the GPU; negative where there are not enough."""
        return self.capacity - self.needed


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The rehearsal of a recipe."""

    recipe: str
    gpu: str
    num_gpus: int
    layout: str
    """In words."""
    sizes: Mapping[str, Optional[int]]
    """tp, pp, vp, cp, ep, etp, dp."""
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    kernels: str
    """"te": as on a GPU with Transformer Engine. "plain": as the plain PyTorch layers of this machine."""
    precision: str
    ranks: tuple[RankRehearsal, ...]
    verdict: Verdict
    seconds: float
    notes: tuple[str, ...] = field(default=())
    """The assumptions of the rehearsal."""

    def rank(self, kind: str) -> RankRehearsal:
        """The rank that stands for ``kind``.

        Raises:
            KeyError: there is none.
        """
        found = [rank for rank in self.ranks if rank.kind == kind]
        if not found:
            raise KeyError(kind)
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; sums that are properties are in it too."""
        result = dataclasses.asdict(self)
        for rank, entry in zip(self.ranks, result["ranks"], strict=True):
            entry["memory"]["total"] = rank.memory.total
            entry["timeline"] = [[event.kind, event.chunk, event.microbatch] for event in rank.timeline]
        result["verdict"]["free"] = self.verdict.free
        return result
