# SPDX-License-Identifier: Apache-2.0
"""Results of a rehearsal as plain data: bytes, messages, arithmetic and the order of work, per kind of rank.

Unless stated otherwise, all values are per optimizer step of the recipe and per rank, in bytes and floating-point
operations (a multiply-add counts as two). Needs no torch. `to_dict` returns the output of `--json`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from nemo2.base.gpus import GIB, HEADROOM, OUTSIDE_TORCH, Answer, answer_of
from nemo2.mcore.parallel.pipeline_schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class MemoryCount:
    """Allocated bytes at the peak of a step after the first."""

    parameters: int
    """Parameters in the model's dtype, with the padding of Megatron-Core's parameter buffers."""
    gradients: int
    """Megatron-Core's gradient buffers."""
    main_parameters: int
    """The optimizer's copies of the parameters, except those that are the model's parameters."""
    optimizer_states: int
    """The optimizer's moments, and other state of its own."""
    buffers: int
    """Module buffers, the micro-batches of the step, and 8-bit copies of weights."""
    activations: Mapping[str, int]
    """Bytes that autograd keeps for the backward, by the part of the model that made them."""
    logits: int
    """Tensors of the output layer and the loss, saved or not."""
    messages: int
    """Buffers of collectives that nothing else holds."""
    working: int
    """All other tensors at the peak: intermediate results, gradients of activations."""
    saved_peak: int
    """The most that autograd kept at any moment, including logits. Not part of the sum."""
    teacher: int = 0
    """Parameters and buffers of a distillation's teacher."""

    @property
    def state(self) -> int:
        own = self.parameters + self.gradients + self.main_parameters + self.optimizer_states + self.buffers
        return own + self.teacher

    @property
    def total(self) -> int:
        return sum(self.terms().values())

    def terms(self) -> dict[str, int]:
        """The summands of `total` by name, largest first, with activations as one of them."""
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
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive, or send_receive (a step of a
    ring)."""
    group: str
    """tensor, data, context, pipeline, expert, expert_tensor, expert_data, embedding, model, world or
    Megatron-Core's name."""
    ranks: int
    """The size of the group."""
    calls: float
    """Calls in a step."""
    bytes: float
    """The sum over the calls of the whole buffer: the output of a gather, the input of a scatter or an all-to-all,
    the message of a send. A ring moves (ranks - 1) / ranks of it per rank, and an all-reduce twice that."""
    per: str
    """"microbatch": the count grows with the number of micro-batches. "step": it doesn't."""


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """The arithmetic of one kind of kernel."""

    kind: str
    """gemm, grouped_gemm (experts), batched_gemm, attention, scan (Mamba, gated DeltaNet)."""
    phase: str
    """"forward" or "backward". Recomputation counts as backward, because it runs during the backward."""
    flops: float
    """Floating-point operations in a step."""


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """One rank, which represents all ranks of its kind."""

    kind: str
    """"only stage", "first stage", "middle stage" or "last stage"."""
    rank: int
    """The number of the rank."""
    stage: int
    """The number of its pipeline stage, from 0."""
    layers: tuple[int, ...]
    """The decoder layers of each chunk."""
    memory: MemoryCount
    """Bytes at the peak."""
    collectives: tuple[CollectiveCount, ...]
    """The collectives of a step."""
    flops: tuple[FlopCount, ...]
    """The arithmetic of a step."""
    num_microbatches: int
    """Micro-batches in a step of the job."""
    num_microbatches_rehearsed: int
    """Micro-batches that the rehearsal ran. Counts are extended to `num_microbatches`."""
    seconds: float
    """The duration of this rank's rehearsal."""


Ranks = dict[str, dict[str, int]]
"""For each kind of rank its bytes by part, the largest first."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a job fits its GPUs."""

    gpu: str
    """The kind of GPU."""
    capacity: int
    """The bytes that torch sees on the GPU."""
    ranks: Ranks
    """The bytes of torch's memory."""
    needed: float
    """The bytes of the GPU with the most memory, including memory outside torch."""
    headroom: float = HEADROOM
    """The fraction of the GPU to leave free, for fragmentation and effects that are not modelled."""
    margin: float = 0.0
    """The error of `needed`, as a fraction of it. 0.0: a rehearsal counted it."""
    why: str = ""
    """Why `needed` is estimated by formula. "": it is not."""
    assumed: bool = False
    """Whether the kind of the machine's GPUs is unknown, so that `gpu` is an assumption."""
    change: Optional[tuple[str, ...]] = None
    """The smallest change that makes the job fit, as overrides. None: it already fits, or no change was found or
    searched for."""
    change_needs: Optional[int] = None
    """`needed` after the change."""

    @property
    def answer(self) -> Answer:
        """Whether `needed` fits. "tight": only without `headroom`, or depending on the error."""
        return answer_of(self.needed, self.capacity, headroom=self.headroom, margin=self.margin)

    @property
    def fits(self) -> bool:
        """Whether `needed` and the headroom fit into `capacity`."""
        return self.answer == "fits"

    @property
    def free(self) -> float:
        """The bytes left on the GPU. Negative if the job does not fit."""
        return self.capacity - self.needed

    @property
    def reserve(self) -> int:
        """The bytes to leave free."""
        return round(self.capacity * self.headroom)

    @property
    def fullest(self) -> str:
        """The kind of rank with the most memory."""
        return max(self.ranks, key=lambda kind: sum(self.ranks[kind].values()))

    @property
    def largest_term(self) -> str:
        """The largest part of the memory of that rank."""
        return next(iter(self.ranks[self.fullest]))

    def sentence(self, name: str = "") -> str:
        """The answer as a sentence. ``name`` is the recipe to rehearse for advice."""
        how = f"estimated by formula, within {self.margin:.0%}" if self.why else "rehearsed"
        sentence = (
            f"{self.answer}: {self.needed / GIB:.1f} of the {self.capacity / GIB:.1f} GiB of one {self.gpu}"
            f"{' (assumed)' if self.assumed else ''}, {how}"
        )
        if self.fits or self.why or not name:
            return sentence
        looks = " and looks for a change that makes the job fit" if self.answer == "does not fit" else ""
        return f"{sentence}; `nemo2 rehearse {name}` counts each part{looks}"

    def headline(self) -> str:
        """The answer in capitals, with what it counts."""
        answer, _, sizes = self.sentence().partition(": ")
        return (
            f"{answer.upper()}: {sizes}; {OUTSIDE_TORCH / GIB:.1f} GiB of it are outside torch, and {self.reserve / GIB:.1f} GiB "
            "must stay free"
        )


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The rehearsal of a recipe."""

    recipe: str
    """The name of the recipe."""
    gpu: str
    """The kind of GPU."""
    num_gpus: int
    """All GPUs of the job."""
    layout: str
    """The layout in words."""
    sizes: Mapping[str, Optional[int]]
    """The sizes tp, pp, vp, cp, ep, etp, dp."""
    schedule: Schedule
    """The order of the passes of all stages."""
    seq_length: int
    """Tokens per sequence."""
    micro_batch_size: int
    """Sequences per forward pass of a rank."""
    global_batch_size: int
    """Sequences per step."""
    kernels: str
    """"te": as on a GPU with Transformer Engine. "plain": as with this machine's plain PyTorch layers."""
    precision: str
    """The precision of the trainer's plugin, such as "bf16-mixed"."""
    ranks: tuple[RankRehearsal, ...]
    """One rank of each kind."""
    verdict: Verdict
    """Whether the job fits."""
    seconds: float
    """The duration of the rehearsal."""
    notes: tuple[str, ...] = field(default=())
    """The assumptions of the rehearsal."""

    def rank(self, kind: str) -> RankRehearsal:
        """The rank that represents ``kind``.

        Raises:
            KeyError: there is no such kind.
        """
        return {rank.kind: rank for rank in self.ranks}[kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, including the sums that are properties."""
        result = dataclasses.asdict(self)
        for rank, entry in zip(self.ranks, result["ranks"], strict=True):
            entry["memory"]["total"] = rank.memory.total
        verdict = self.verdict
        result["verdict"] = {
            name: getattr(verdict, name)
            for name in (
                *("answer", "gpu", "capacity", "needed", "fullest", "largest_term"),
                *("change", "change_needs", "fits", "free"),
            )
        } | {"outside_torch": OUTSIDE_TORCH, "headroom": verdict.reserve}
        return result


def parts_of(ranks: Iterable[RankRehearsal]) -> Ranks:
    """The bytes of rehearsed ranks by part."""
    return {rank.kind: {name: size for name, size in rank.memory.terms().items() if size} for rank in ranks}


def peak_of(ranks: Ranks) -> int:
    """The bytes on the GPU with the most memory, including memory outside torch."""
    return max(sum(parts.values()) for parts in ranks.values()) + OUTSIDE_TORCH
