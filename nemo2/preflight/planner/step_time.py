# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a training step: its layers, the pipeline's bubble, and the collectives that don't overlap."""

import dataclasses
import math
from typing import Optional

from nemo2.models.parts import Experts, Linear
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.constants import Constants, calibrated
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.layer_time import Kernels, again, layers_time
from nemo2.preflight.planner.links import bandwidth, gathered_fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step."""

    parts: dict[str, float]
    """Seconds by the name of the part. They add up to `total`."""
    tokens: int
    """Tokens in a step."""
    gpus: int
    """GPUs of the job."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.total / self.gpus


def predict(shape: ModelShape, job: Job, c: Optional[Constants] = None) -> StepTime:
    """Predict the time of one step of ``job`` from its work and the constants of kernels and links.

    Args:
        shape: The model's shape.
        job: The batch, layout and GPUs.
        c: The constants of kernels and links. None: the calibrated constants.
    """
    c = c or calibrated()
    p, v, m = job.pp, job.vp, job.micro_batches
    stage = layers_time(shape, job, c)
    body, head = sum(stage.values()), Kernels(shape, job, c).output_layer()
    slowest = _slowest_stage(shape, job, body, head)
    launching, sharded = _around(shape, job, c, stage, slowest)
    micro = slowest + launching + sharded
    mean = body + head / p
    mean += sum(_around(shape, job, c, stage, mean))
    parts = {
        **{name: m * value for name, value in stage.items()},
        "output layer and uneven stages": m * (slowest - body),
        "sharded weights": m * sharded,
        "launching": m * launching,
        "bubble": (p - 1) / v * mean,
        "pipeline": _pipeline_sends(shape, job, c),
        "data parallel": _data_parallel(shape, job, c, micro),
        "optimizer": _optimizer(shape, job, c),
        # The more machines, the slower the slowest of them. All others wait for it.
        "waiting": c.scale * math.log2(max(1.0, job.gpus / 8)) * m * micro,
    }
    return StepTime(
        parts={name: value for name, value in parts.items() if value},
        tokens=round(m * job.dp * job.micro_batch * job.seq),
        gpus=job.gpus,
    )


def teaching_time(teacher: ModelShape, job: Job, c: Optional[Constants] = None) -> float:
    """The seconds per step of a teacher's forward: a third of forward and backward, for every micro-batch, with one
    pipeline fill."""
    c, alone = c or calibrated(), dataclasses.replace(job, recompute="none", lora=False, adapters=None)
    micro = sum(layers_time(teacher, alone, c).values()) + Kernels(teacher, alone, c).output_layer()
    return (job.micro_batches + job.pp - 1) * micro / 3


def _around(shape: ModelShape, job: Job, c: Constants, stage: dict[str, float], kernels: float) -> tuple[float, float]:
    """The seconds that kernel launches, and then ZeRO-3's collectives, add to a stage's kernels."""
    launching = _launching(shape, job, c, stage, kernels)
    return launching, _sharded_weights(shape, job, c, kernels + launching)


def _slowest_stage(shape: ModelShape, job: Job, body: float, head: float) -> float:
    """The seconds of the slowest stage: a full stage, or the last stage with the output layer and additional
    predictions.

    If the number of chunks doesn't divide the layers, some stages have one layer fewer. As in NeMo's and Megatron's
    recipes, these are the last stages, as many as the extra work of the last stage requires.
    """
    if job.pp == 1:
        return body + head
    layers, further = len(shape.layers), len(shape.further)
    layer = body * job.pp / (layers + further)
    beside = head + further * layer
    chunks = job.pp * job.vp
    full = math.ceil(layers / chunks)
    fewer = min(full * chunks - layers, full, math.ceil(beside / layer))
    return max(full * job.vp * layer, (full * job.vp - fewer) * layer + beside)


def _beyond(gpu: float, host: float) -> float:
    """The seconds that ``host`` seconds of launching add to ``gpu`` seconds of kernels: the full difference if
    launching is slower, and a little if both are similar."""
    return (gpu**4 + host**4) ** 0.25 - gpu


def _launching(shape: ModelShape, job: Job, c: Constants, stage: dict[str, float], gpu: float) -> float:
    """The seconds that the host adds to ``gpu`` seconds of a stage's kernels.

    The host runs ahead of the GPU. Before it can launch routed experts, however, it waits for the number of tokens of
    each expert, and loses its lead. The kernels of experts are therefore compared with their own launching time.
    """
    share = sum(again(shape, job).values()) / sum(shape.parts.values()) if job.recompute == "full" else 0.0
    launched = 1 + share / 3
    # A layer has two blocks: attention or a mixer, and a feed-forward part.
    host = c.layer_us * 1e-6 * shape.blocks / 2 / job.pp * launched * (c.graphed if job.cuda_graphs else 1.0)
    each = 0.0 if job.fused_experts else c.expert_us + (c.expert_cast_us if job.low_precision else 0.0)
    moes = sum(count for part, count in shape.parts.items() if isinstance(part, Experts))
    routing = (c.moe_us + each * shape.experts / job.ep) * 1e-6 * moes / job.pp * launched
    if job.capacity or job.graphed_experts:
        return _beyond(gpu, host + routing * (c.graphed if job.graphed_experts else 1.0))
    experts = stage.get("experts", 0.0) + stage.get("expert parallel", 0.0)
    return _beyond(gpu - experts, host) + _beyond(experts, routing)


@dataclasses.dataclass(frozen=True)
class Held:
    """The weights that a rank holds, and the number of ranks with the same weights: for dense weights, and for
    routed experts."""

    dense: float
    dense_copies: int
    routed: float
    routed_copies: int


def held_weights(shape: ModelShape, job: Job, *, embeddings: float) -> Held:
    """The weights on a rank of a stage with an average share of the layers and ``embeddings`` embedding matrices."""
    return Held(
        dense=shape.dense_parameters / (job.tp * job.pp) + embeddings * shape.embedding_parameters / job.tp,
        dense_copies=job.dp * job.cp,
        routed=shape.routed_parameters / (job.ep * job.etp * job.pp),
        routed_copies=max(1, job.gpus // job.pp // (job.ep * job.etp)),
    )


def trained_weights(shape: ModelShape, job: Job, *, embeddings: float) -> Held:
    """The trainable part of `held_weights`: all weights, or the adapters beside frozen weights."""
    if not job.lora:
        return held_weights(shape, job, embeddings=embeddings)
    counted = [(linear, count) for part, count in shape.parts.items() for linear in part.linears]
    dense, routed = (
        sum(count * _low_rank(linear, job) for linear, count in counted if (linear.copies > 1) == of_experts) / job.pp
        for of_experts in (False, True)
    )
    copies = held_weights(shape, job, embeddings=0)
    return dataclasses.replace(copies, dense=dense, routed=routed / job.ep)


def _low_rank(linear: Linear, job: Job) -> float:
    """The adapter weights of all copies of a linear layer on one tensor-parallel rank."""
    if job.adapters is None:
        return 0.0
    share, firsts = job.adapters.of(linear.name)
    ranks = job.etp if linear.copies > 1 else job.tp
    inputs = linear.inputs / (ranks if linear.split == "row" else 1)
    outputs = linear.outputs / (ranks if linear.split == "column" else 1)
    lengths = outputs if job.adapters.lengths else 0.0
    return share * linear.copies * (job.adapters.rank * (firsts * inputs + outputs) + lengths)


def _ring(job: Job, c: Constants, held: Held) -> float:
    """The seconds per byte and weight to pass every rank's weights once around its copies."""
    dense = held.dense * gathered_fraction(held.dense_copies) / bandwidth(job, held.dense_copies, job.tp, c)
    stride = job.ep * job.etp
    routed = held.routed * gathered_fraction(held.routed_copies) / bandwidth(job, held.routed_copies, stride, c)
    return dense + routed


def _sharded_weights(shape: ModelShape, job: Job, c: Constants, compute: float) -> float:
    """The seconds that ZeRO-3 adds to a micro-batch: weights gathered for forward and backward, gradients scattered,
    six bytes a weight."""
    if job.sharding != "fsdp":
        return 0.0
    seconds = (2 + 2 + (0 if job.lora else 2)) * _ring(
        job, c, held_weights(shape, job, embeddings=_embeddings(shape) / job.pp)
    )
    return _beyond(compute, seconds) + c.fsdp_exposed * seconds


def _embeddings(shape: ModelShape) -> int:
    return 1 if shape.tied else 2


def _fullest(shape: ModelShape, job: Job) -> Held:
    """The trained weights of the first or the last stage, which have one embedding matrix more than the stages
    between."""
    return trained_weights(shape, job, embeddings=1 if job.pp > 1 else _embeddings(shape))


def _pipeline_sends(shape: ModelShape, job: Job, c: Constants) -> float:
    """The sends of activations and gradients between stages. Neighboring stages are a whole replica of a stage
    apart."""
    if job.pp == 1:
        return 0.0
    rate = bandwidth(job, 2, job.gpus // job.pp, c)
    send = (
        job.tokens * shape.hidden * 2 / (job.tp if job.scattered_sends else job.sequence_ranks) / rate
        + c.collective_us * 1e-6
    )
    shown = c.pp_exposed if job.overlap_pp and job.vp > 1 else 1.0
    return 2 * job.vp * send * (job.micro_batches * shown + job.pp - 1)


def _data_parallel(shape: ModelShape, job: Job, c: Constants, micro: float) -> float:
    """The reduction of gradients and the gather of weights, once a step, minus the part that overlaps with the last
    backward and first forward."""
    if job.sharding == "fsdp":
        return 0.0
    ring = _ring(job, c, _fullest(shape, job))
    reduce, gather = job.grad_bytes * ring, 2 * ring
    if job.sharding == "replicated":
        reduce, gather = 2 * reduce, 0.0
    if job.overlap_grad:
        reduce = max(c.dp_exposed * reduce, reduce - c.dp_hidden * micro * 2 / 3)
    if job.overlap_param:
        gather = max(c.dp_exposed * gather, gather - c.dp_hidden * micro / 3)
    return reduce + gather


def _optimizer(shape: ModelShape, job: Job, c: Constants) -> float:
    held = _fullest(shape, job)
    owned = held.dense + held.routed
    if job.sharding != "replicated":
        owned = held.dense / held.dense_copies + held.routed / held.routed_copies
    return c.optimizer_bytes * owned / job.gpu.hbm + c.step_ms * 1e-3
