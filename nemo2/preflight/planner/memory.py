# SPDX-License-Identifier: Apache-2.0
"""Predicts the peak memory of a training step on a GPU, by part, with formulas.

The formulas serve the search over many layouts, and jobs that can't be rehearsed. For other jobs
`nemo2.preflight.rehearse` counts the memory to the byte.
"""

import dataclasses
from collections.abc import Mapping
from typing import Optional

from nemo2.models.parts import MLP, Attention, DeltaNet, Experts, LatentAttention, Linear, Mixer, Part
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.layer_time import again
from nemo2.preflight.planner.step_time import Held, held_weights, trained_weights

GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Estimates that have no formula, based on how torch allocates. ``python -m bench.planner --memory`` scores them."""

    eager: float = 1.8
    """The factor of activations if elementwise kernels keep their inputs one by one: a norm in plain torch keeps 12
    bytes per element where a fused norm keeps 4, a gated activation 8 instead of 6, and the rotation its inputs."""
    logits: float = 8.0
    """Bytes per logit that are allocated at once with Megatron-Core's loss, which works in place: 16-bit output,
    fp32 copy, 16-bit gradient."""
    torch_logits: float = 18.0
    """Bytes per logit that are allocated at once with torch's loss: the 16-bit output, and in fp32 its copy, the
    logarithms of the softmax, and a gradient of each."""
    context: float = 2.0
    """GB of CUDA's context, NCCL and libraries outside torch's allocator."""
    fragmentation: float = 0.08
    """The fraction of the allocated memory that, at the peak, is in blocks too small for any tensor."""


GUESSED = MemoryConstants()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank of a pipeline stage."""

    parts: dict[str, float]
    """Bytes by the name of the part. They add up to `allocated`."""
    stage: int
    """The number of the pipeline stage, from 0."""
    beside: float
    """Bytes outside torch's allocator, and those lost to fragmentation."""

    @property
    def allocated(self) -> float:
        """The peak of torch's allocated memory."""
        return sum(self.parts.values())

    @property
    def used(self) -> float:
        """The memory that `nvidia-smi` shows, which includes memory outside torch and the allocator's fragmentation."""
        return self.allocated + self.beside


def predict_memory(
    shape: ModelShape,
    job: Job,
    c: MemoryConstants = GUESSED,
    *,
    stage: Optional[int] = None,
    teacher: Optional[ModelShape] = None,
) -> MemoryEstimate:
    """Predict the memory of a rank of a pipeline stage.

    The first stage holds the most micro-batches, and the last the logits.

    Args:
        shape: The model's shape.
        job: The batch, layout and GPUs.
        c: Estimates that have no formula.
        stage: The number of the stage, from 0. None: the stage with the most memory.
        teacher: The shape of a teacher beside the model. None: no distillation.
    """
    stages = sorted({0, job.pp - 1}) if stage is None else [stage]
    return max((_stage(shape, job, c, one, teacher) for one in stages), key=lambda memory: memory.allocated)


def _stage(
    shape: ModelShape, job: Job, c: MemoryConstants, stage: int, teacher: Optional[ModelShape]
) -> MemoryEstimate:
    state = _state(shape, job, stage)
    if teacher is not None:
        held = _weights(teacher, job, stage)
        waiting = job.micro_batches if job.pp > 1 else 1
        logits = waiting * job.tokens * teacher.vocab / job.tp if stage == job.pp - 1 else 0.0
        state["teacher"] = (4 if job.precision == "fp32" else 2) * (held.dense + held.routed + logits)
    activations, logits = _activations(shape, job, c, stage)
    # The output layer's tensors are freed before its gradients reach the layers below, so only one of the two is at its
    # peak.
    parts = {
        **state,
        "activations": activations,
        "logits": logits,
        "working": max(0.0, _working(shape, job) - logits),
    }
    allocated = sum(parts.values())
    return MemoryEstimate(
        parts={name: value for name, value in parts.items() if value},
        stage=stage,
        beside=c.context * GB + c.fragmentation * allocated,
    )


def _state(shape: ModelShape, job: Job, stage: int) -> dict[str, float]:
    """Weights, gradients and optimizer state of dense layers and experts, each sharded over the ranks that hold it."""
    held = _weights(shape, job, stage)
    trained = trained_weights(shape, job, embeddings=0) if job.lora else held
    weight, parts = 4 if job.precision == "fp32" else 2, {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for count, updated, copies in (
        (held.dense, trained.dense, held.dense_copies),
        (held.routed, trained.routed, held.routed_copies),
    ):
        shards = copies if job.sharding == "fsdp" else 1
        owners = copies if job.sharding in ("fsdp", "zero1") else 1
        parts["weights"] += weight * (count + (updated if job.lora else 0.0)) / shards
        parts["gradients"] += job.grad_bytes * updated / shards
        parts["optimizer"] += job.state_bytes * updated / owners
    if job.sharding == "fsdp":
        # Two layers are gathered at a time, the current and the next, with the gradients of one.
        layers = max(1, len(shape.layers) / job.pp)
        parts["gathered weights"] = (2 * weight + job.grad_bytes) * (held.dense + held.routed) / layers
    return parts


def _weights(shape: ModelShape, job: Job, stage: int) -> Held:
    """The weights of a stage with its embeddings, positions and final norm. Stages with different numbers of layers
    count as equal."""
    first, last = stage == 0, stage == job.pp - 1
    held = held_weights(shape, job, embeddings=first + (last and not (shape.tied and job.pp == 1)))
    outside = first * shape.positions * shape.hidden + last * shape.final_norm
    return dataclasses.replace(held, dense=held.dense + outside)


def in_flight(job: Job, stage: int) -> float:
    """The number of micro-batches whose activations a stage keeps, for all its layers, at the peak of Megatron-Core's
    schedules.

    1F1B: the number of stages from this one on. Interleaved: 2 (pp - stage - 1) + (vp - 1) pp + 1 chunks.
    """
    if job.pp == 1:
        return 1.0
    if job.vp == 1:
        return min(job.pp - stage, job.micro_batches)
    return min((job.pp * job.vp + job.pp - 1 - 2 * stage) / job.vp, job.micro_batches)


def _activations(shape: ModelShape, job: Job, c: MemoryConstants, stage: int) -> tuple[float, float]:
    """The bytes of activations, and those of the logits."""
    alive, layers, tokens = in_flight(job, stage), len(shape.layers) / job.pp, job.tokens
    block_input = 2 * tokens * shape.hidden / job.sequence_ranks
    kept = sum(count * part_activations(part, job, c) for part, count in _kept_whole(shape, job).items()) / job.pp
    activations = (kept + job.vp * job.kept_inputs(layers / job.vp) * block_input) * alive
    if job.recompute == "full":
        # Layers that are recomputed together keep all activations while their gradients are computed.
        group = job.recompute_layers if job.recompute_method == "uniform" else 1
        activations += min(group, layers / job.vp) * layer_activations(shape, job, c)
    elif job.offloaded_layers:
        # One layer is copied to the host while the next is computed.
        activations += layer_activations(shape, job, c)
    if stage == 0:
        activations += block_input * alive * (1.5 if job.dropout else 1.0)
    if stage < job.pp - 1:
        return activations, 0.0
    alive_bytes = c.torch_logits if job.torch_loss else c.logits
    logits = (1 + len(shape.further)) * alive_bytes * tokens * shape.vocab / job.loss_ranks
    return activations + 2 * block_input, logits  # input and output of the last norm


def _kept_whole(shape: ModelShape, job: Job) -> Mapping[Part, int]:
    """The parts of all layers whose activations for the backward stay on the GPU."""
    if job.recompute == "full":
        gone = again(shape, job)
    elif job.offloaded_layers:
        gone = shape.parts_of(range(min(job.offloaded_layers, len(shape.layers))))
    else:
        return shape.parts
    return {part: count - gone.get(part, 0) for part, count in shape.parts.items()}


def _working(shape: ModelShape, job: Job) -> float:
    """The gradients of one block: of its widest tensor, of its output, and of a gathered tensor."""
    widths = [0.0]  # the channels of a token between the products of a block on one rank
    for part in shape.parts:
        if isinstance(part, Experts):
            widths.append(part.topk * (part.outer + part.inner / job.etp) * job.etp / job.tp)
        elif isinstance(part, MLP | Mixer | DeltaNet):
            widths.append(part.linears[0].outputs / job.tp)
    return 2 * job.tokens * (2 * max(widths) + 3 * shape.hidden)


def layer_activations(shape: ModelShape, job: Job, c: MemoryConstants = GUESSED) -> float:
    """The bytes that a mean layer keeps of one micro-batch for its backward, if the layer is not recomputed whole.

    Korthikanti et al. (arXiv 2205.05198), section 4: inputs and outputs of norms, query, key and value, the attention's
    output, the feed-forward layer's inner tensors, and with dropout a mask of a byte per element. If attention keeps
    its scores, they are added: two of 16 bits and a mask. A layer of experts keeps its tokens' copies.
    """
    kept = sum(count * part_activations(part, job, c) for part, count in shape.parts.items())
    return kept / len(shape.layers)


def part_activations(part: Part, job: Job, c: MemoryConstants = GUESSED) -> float:
    """The bytes that one part keeps of one micro-batch."""
    per_token = _inside(part, job) + _between_factors(part, job)
    # The input and output of the norm before a block, and the mask after the block.
    normed = 0 if job.recomputes("layernorm") or not _needs_input(part.linears[0], job) else 2
    per_token += (2 + normed + (1 if job.dropout else 0)) * part.hidden / job.sequence_ranks
    if not job.compiled:
        per_token *= c.eager
    scores = 0.0
    if isinstance(part, Attention | LatentAttention) and job.keeps_scores and not job.recomputes("core_attn"):
        scores = (10 if job.attention == "eager" else 5) * part.heads * job.seq / job.tp
    return job.tokens * (per_token + scores)


def _inside(part: Part, job: Job) -> float:
    """The bytes per token that a part keeps after its norm."""
    if isinstance(part, MLP):
        return 0 if job.recomputes("mlp") else _mlp_bytes(part, job)
    if isinstance(part, Experts):
        return 0 if job.recomputes("moe") else _expert_bytes(part, job)
    if isinstance(part, Mixer):
        # The output of the projection before and after the convolution, the scan's output, and a state per chunk of 256
        # tokens.
        projected = part.linears[0].outputs
        return (2 * (2 * projected + 2 * part.inner) + 4 * part.inner * part.states / 256) / job.tp
    if isinstance(part, DeltaNet):
        # The output of the projection, the convolution's before and after its activation, queries and keys before and after
        # their norms and for each value head, and of each value head's output, norm and gate two 16-bit and four fp32 tensors.
        keys, values = part.key_heads * part.key_dim, part.value_heads * part.value_dim
        repeated = part.value_heads * part.key_dim
        return 2 * (part.linears[0].outputs + 3 * (2 * keys + values) + 4 * keys + 2 * repeated + 11 * values) / job.tp
    if not isinstance(part, Attention | LatentAttention):
        return 0.0
    inside = 2 * (part.query_width + part.value_width + part.kv_width) / job.tp
    if isinstance(part, Attention):
        return inside
    latents = 2 * (part.query_rank + part.latent) + 2 * 2 * part.heads * part.rope_dim / job.tp
    return latents + (2 * part.value_width / job.tp if job.recomputes("mla_up_proj") else inside)


def _needs_input(linear: Linear, job: Job) -> bool:
    """Whether a linear layer's input is kept for gradients, of its weight or of an adapter."""
    return not job.lora or job.adapters is None or job.adapters.of(linear.name)[0] > 0


def _between_factors(part: Part, job: Job) -> float:
    """The bytes per token that adapters keep: the tensor between the factors; for DoRA also the sum that the lengths
    scale; for dropout a mask of a byte per element, and dropped inputs."""
    if job.adapters is None:
        return 0.0
    kept = 0.0
    for linear in part.linears:
        share, firsts = job.adapters.of(linear.name)
        routed = linear.copies > 1
        ranks = job.etp if routed else job.tp if linear.split == "column" else job.sequence_ranks
        scaled = linear.outputs / ranks if job.adapters.lengths else 0.0
        met = linear.met * job.etp / job.tp if routed else 1
        inputs = linear.inputs / (job.etp if routed else job.tp if linear.split == "row" else job.sequence_ranks)
        masked = {"pre": firsts * inputs, "post": linear.outputs / ranks, None: 0.0}[job.adapters.dropped]
        # The input after dropout replaces the kept input. Attention keeps its output anyway.
        attended = isinstance(part, Attention | LatentAttention) and linear.split == "row"
        again = max(0.0, firsts - (0 if attended else 1)) * inputs if job.adapters.dropped == "pre" else 0.0
        kept += share * met * (2 * (job.adapters.rank * firsts + scaled + again) + masked)
    return kept


def _mlp_bytes(part: MLP, job: Job) -> float:
    activated = part.width if _needs_input(part.linears[1], job) else 0
    return 2 * (part.inner + activated + (part.width if job.gate_kept else 0)) / job.tp


def _expert_bytes(part: Experts, job: Job) -> float:
    keeps = _needs_input(part.routed[1], job) and not job.recomputes("moe_act")
    activated = part.width if keeps else 0
    gate = part.width if job.gate_kept and not job.recomputes("moe_act") else 0
    inner = 2 * (part.inner + activated + gate) / job.etp
    # One copy sorted by expert, and one sorted back. Frozen experts keep only the input of the first product's adapter.
    copies = 2 if not job.lora or job.adapters is None else int(_needs_input(part.routed[0], job))
    routed = part.topk * (2 * copies * part.outer + inner) * job.etp / job.tp
    if part.shared is None or job.recomputes("shared_experts"):
        return routed
    return routed + _mlp_bytes(part.shared, job)
