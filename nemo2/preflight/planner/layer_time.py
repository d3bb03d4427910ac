# SPDX-License-Identifier: Apache-2.0
"""The seconds of one layer on one rank for one micro-batch, by kind of kernel, separately for forward and backward."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Union

from nemo2.models.parts import MLP, Attention, DeltaNet, Experts, LatentAttention, Linear, Mixer, Part, Projection
from nemo2.models.shape import ModelShape
from nemo2.preflight.planner.constants import Constants
from nemo2.preflight.planner.job import Job
from nemo2.preflight.planner.links import bandwidth, exchange_seconds, gathered_fraction

# The forward pass's share of elementwise traffic.
_FORWARD = 0.4
# The upper bound of any kernel's share of the data-sheet rate. An H20 comes near it, because it has the power limit of a
# chip with six times its rate.
_MOST_OF_RATE = 0.85


class Passes(NamedTuple):
    """The seconds of a forward and of a backward."""

    forward: float
    backward: float

    def __add__(self, other: tuple[float, ...]) -> "Passes":
        return Passes(self.forward + other[0], self.backward + other[1])

    @property
    def total(self) -> float:
        return self.forward + self.backward


NOTHING = Passes(0.0, 0.0)
_AnyAttention = Union[Attention, LatentAttention]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The rates of one job's kernels on its GPU."""

    shape: ModelShape
    job: Job
    c: Constants

    @property
    def rate16(self) -> float:
        """The FLOP/s of large products in 16 bits, or in fp32 for a job in fp32."""
        return self.job.gpu.rate("fp32" if self.job.precision == "fp32" else "bf16") * self.gemm_share

    @property
    def gemm_share(self) -> float:
        """The share of the data-sheet rate that large products reach."""
        gpu = self.job.gpu
        return min(_MOST_OF_RATE, self.c.gemm[gpu.generation] * gpu.power**self.c.power)

    @property
    def element(self) -> int:
        """The bytes of an activation's element."""
        return 4 if self.job.precision == "fp32" else 2

    @property
    def linear_rate(self) -> float:
        """The FLOP/s of linear layers in the job's precision."""
        if not self.job.low_precision:
            return self.rate16
        share = self.c.gemm_fp8 if self.job.precision == "fp8" else self.c.gemm_fp4
        return self.job.gpu.rate(self.job.precision) * self.gemm_share * share

    def product(self, rows: float, k: float, n: float, *, rate: float, element: float, weights: float = 1) -> float:
        """The seconds of ``[rows, k] @ [k, n]``: its FLOPs, the waste of partly filled tiles, and the operands' traffic.
        With several ``weights`` each multiplies an equal share of the rows."""
        wasted = 1 + self.c.gemm_edge * (weights / rows + 1 / k + 1 / n)
        moved = element * (rows * k + weights * k * n) + self.element * rows * n
        return 2 * rows * k * n / rate * wasted + self.c.gemm_bytes * moved / self.job.gpu.hbm

    def linear(self, rows: float, k: float, n: float) -> Passes:
        """The time of a linear layer. The backward computes the gradient of the input, and the gradient of the weight,
        which it adds to the gradient buffer."""
        rate, element, hbm = self.linear_rate, 1 if self.job.low_precision else self.element, self.job.gpu.hbm
        forward = self.product(rows, k, n, rate=rate, element=element)
        backward = self.product(rows, n, k, rate=rate, element=element)
        if not self.job.lora:
            backward += self.product(k, rows, n, rate=rate, element=element) + self.c.accumulate_bytes * k * n / hbm
        if self.job.low_precision:
            cast = self.c.cast_bytes / hbm
            forward += cast * rows * k
            backward += cast * (rows * n + 0.25 * k * n)
        return Passes(forward, backward)

    def chain(self, *linears: Linear) -> Passes:
        """The time of consecutive linear layers, each sharded over the tensor-parallel ranks."""
        total, t = NOTHING, self.job.tp
        for linear in linears:
            k = linear.inputs / (t if linear.split == "row" else 1)
            n = linear.outputs / (t if linear.split == "column" else 1)
            total += self.linear(self.job.tokens, k, n)
        return total

    def moving(self, moved: float) -> Passes:
        """The time of elementwise kernels that move ``moved`` bytes in forward and backward together."""
        seconds = moved / self.job.gpu.hbm * (self.element / 2) * (1.0 if self.job.compiled else self.c.eager)
        return Passes(_FORWARD * seconds, (1 - _FORWARD) * seconds)

    # ------------------------------------------------------------------------------------------------- parts of a layer

    def core_attention(self, part: _AnyAttention) -> Passes:
        """The time of scores, softmax and weighted values.

        A fused kernel skips masked future tokens. It recomputes the scores in the backward, which then has five products
        instead of four (FlashAttention-2, arXiv 2307.08691, section 3.1.2).
        """
        job, c = self.job, self.c
        scores = job.tokens * job.attended * part.heads / job.tp * seen(part, job.attended)
        flops = 2 * scores * part.score_channels
        if job.keeps_scores:
            moved = (c.eager_score_bytes if job.attention == "eager" else c.score_bytes) * scores / job.gpu.hbm
            return Passes(flops / self.rate16 + _FORWARD * moved, 2 * flops / self.rate16 + (1 - _FORWARD) * moved)
        return Passes(0.5 * flops / self.attention_rate, 1.25 * flops / (0.8 * self.attention_rate))

    @property
    def attention_rate(self) -> float:
        """The FLOP/s of the job's fused attention in the forward."""
        gpu, c = self.job.gpu, self.c
        rate = gpu.rate("bf16") * min(_MOST_OF_RATE, c.flash[gpu.generation] * gpu.power**c.power)
        if self.job.low_attention and "fp8" in gpu.flops:
            rate *= c.flash_fp8
        if self.job.attention in ("flash1", "flash2") and gpu.generation in ("hopper", "blackwell"):
            rate *= c.flash2
        return rate * (c.flash1 if self.job.attention == "flash1" else 1.0)

    def norm(self) -> Passes:
        """The time of the norm before a block and the residual sum after it, which sequence parallelism shards."""
        return self.moving(0.5 * self.c.norm_bytes * self.job.tokens * self.shape.hidden / self.job.sequence_ranks)

    def around_attention(self, part: _AnyAttention) -> Passes:
        """The time of norm, residual sum, rotary embedding, and changes to the layout of heads."""
        inside = 0.5 * self.c.inner_bytes * (part.query_width + part.kv_width) / self.job.tp
        return self.norm() + self.moving(self.job.tokens * inside)

    def activation_of(self, rows: float, width: float) -> Passes:
        """The time of a feed-forward layer's activation function. ``width`` is the width of the first product."""
        return self.moving(self.c.inner_bytes * rows * width)

    def feed_forward(self, part: MLP) -> Passes:
        """The time of a dense feed-forward layer, or of the shared experts, including the activation function."""
        return self.chain(*part.linears) + self.activation_of(self.job.tokens, part.inner / self.job.tp)

    def recurrence(self, part: Union[Mixer, DeltaNet]) -> Passes:
        """The time of a Mamba 2 mixer or a gated DeltaNet: its projections, and the bytes that convolution, recurrence and
        gated norm move, with a state per 256 and per 64 tokens."""
        if isinstance(part, Mixer):
            channels, states = part.inner, part.states / 256
        else:
            channels, states = part.value_heads * part.value_dim, part.key_dim / 64
        moved = self.job.tokens * channels / self.job.tp * (self.c.mixer_bytes + 4 * states)
        return self.chain(*part.linears) + self.moving(moved)

    def routed_rows(self, part: Experts) -> float:
        """The token copies that a rank's experts process: an even share of all copies."""
        return self.job.tokens * part.topk / self.job.tp * self.job.etp

    def grouped_products(self, part: Experts) -> Passes:
        """The time of the matrix products of the routed experts on a rank, and of their activation function."""
        job, c = self.job, self.c
        local, rows = max(1.0, part.count / job.ep), self.routed_rows(part)
        element, hbm = 1 if self.job.low_precision else self.element, job.gpu.hbm
        rate = self.linear_rate * c.expert_gemm
        total = NOTHING
        inner = part.inner / job.etp
        for k, n in ((part.outer, inner), (part.width / job.etp, part.outer)):
            forward = self.product(rows, k, n, rate=rate, element=element, weights=local)
            backward = (1 if job.lora else 2) * forward + (0 if job.lora else c.accumulate_bytes * local * k * n / hbm)
            if self.job.low_precision:
                # Fused kernels cast the inner tensors without another pass over memory.
                forward += 0 if job.fused_experts and n == part.outer else c.cast_bytes * rows * k / hbm
                backward += 0 if job.fused_experts and k == part.outer else c.cast_bytes * rows * n / hbm
            total += Passes(forward, backward)
        return total if job.fused_experts else total + self.activation_of(rows, inner)

    def experts(self, part: Experts) -> Passes:
        """The time of routed experts, of the sorts of tokens before and after them, and of shared experts.

        Tokens are sorted by rank before the transfer and by expert after it. Kernels that send each token once do the
        first sort during the transfer. The padding of 8-bit rows to multiples of 16 or 32 counts as a third sort.
        """
        share = 0.5 if self.job.dispatch == "once" and self.job.ep > 1 else 1.0
        share += 0.5 if self.job.low_precision and not self.job.fused_experts else 0.0
        total = self.grouped_products(part)
        total += self.moving(share * self.c.sort_bytes * self.routed_rows(part) * part.outer)
        total += self.chain(*(linear for linear in part.linears if "latent" in linear.name))
        return total + self.feed_forward(part.shared) if part.shared is not None else total

    # ------------------------------------------------------------------------------------------------------ collectives

    def tensor_parallel(self) -> Passes:
        """The time of the gather and the scatter around one block.

        Each pass moves as many bytes as one all-reduce (Korthikanti et al., arXiv 2205.05198, section 4.2.2). With
        sequence parallelism the backward gathers the block's input again for the gradients of the weights.
        """
        job = self.job
        if job.tp == 1:
            return NOTHING
        # A gather for an 8-bit product moves 8 bits per element. A reduce-scatter carries sums in 16 bits.
        element = 0.75 * self.element if self.job.low_precision and job.sp else self.element
        volume = job.tokens * self.shape.hidden * element * gathered_fraction(job.tp)
        one = volume / bandwidth(job, job.tp, 1, self.c) + self.c.collective_us * 1e-6
        shown = self.c.tp_exposed if job.overlap_tp and job.sp else 1.0
        again = 0.5 if job.sp and not job.lora else 0.0
        return Passes(2 * one * shown, (2 + again) * one * shown)

    def context_parallel(self, part: _AnyAttention) -> Passes:
        """The time of the ring of keys and values that core attention does not hide."""
        job = self.job
        if job.cp == 1:
            return NOTHING
        volume = job.tokens * part.kv_width / job.tp * self.element * (job.cp - 1)
        seconds, core = volume / bandwidth(job, job.cp, job.tp, self.c), self.core_attention(part)
        return Passes(max(0.1 * seconds, seconds - core.forward), max(0.2 * seconds, 2 * seconds - core.backward))

    def expert_parallel(self, part: Experts) -> Passes:
        """The time to send tokens to their experts and back in each pass. Tensor-parallel experts also gather the tokens of
        their group, and scatter the results."""
        job, c = self.job, self.c
        copies = self.routed_rows(part) / job.etp * part.outer * self.element
        one = 0.0
        if job.ep > 1:
            choices = part.topk if job.dispatch == "once" else 1
            one = exchange_seconds(job, copies / choices, job.ep, job.etp, c, choices=choices) + c.collective_us * 1e-6
        if job.etp > 1:
            one += copies * (job.etp - 1) / bandwidth(job, job.etp, 1, c) + c.collective_us * 1e-6
        return Passes(2 * one, 2 * one)

    def output_layer(self) -> float:
        """The seconds of logits and loss of one micro-batch in both passes, including multi-token predictions."""
        shape, job = self.shape, self.job
        products = self.product(job.tokens, shape.hidden, shape.vocab / job.tp, rate=self.rate16, element=self.element)
        loss = self.c.logit_bytes * job.tokens * shape.vocab / job.loss_ranks / job.gpu.hbm
        return (1 + len(shape.further)) * ((2 if job.lora else 3) * products + loss)

    # ---------------------------------------------------------------------------------------------------------- adapters

    def adapters(self, part: Part) -> Passes:
        """The time of the adapters of a part's frozen layers: both factors' products in three passes, the scaling of
        their product, and the sums with the layer's output and its input's gradient."""
        job, adapters, total = self.job, self.job.adapters, NOTHING
        if adapters is None:
            return total
        for linear in part.linears:
            share, firsts = adapters.of(linear.name)
            if not share:
                continue
            rows, ranks = job.tokens, job.tp
            # Each rank multiplies a replicated factor with its own part of the sequence.
            part_of_rows = job.tokens / job.sequence_ranks
            if isinstance(part, Experts) and linear.copies > 1:
                rows = part_of_rows = self.routed_rows(part)
                ranks = job.etp
            rows_in = rows if linear.split == "row" else part_of_rows
            rows_out = rows if linear.split == "column" else part_of_rows
            k = linear.inputs / (ranks if linear.split == "row" else 1)
            n = linear.outputs / (ranks if linear.split == "column" else 1)
            products = self._thin(rows_in, k, firsts * adapters.rank) + self._thin(rows_out, adapters.rank, n)
            byte = self.element / job.gpu.hbm
            # The scaling reads and writes, a sum reads twice and writes.
            forward, backward = (
                products + 5 * rows_out * n * byte,
                2 * products + (2 * rows_out * n + 3 * rows_in * k) * byte,
            )
            if adapters.lengths:
                # The product of both factors is as large as the weight. DoRA computes the length of each row of the sum
                # of both, in fp32.
                forward += self._thin(n, adapters.rank, k) + 20 * n * k / job.gpu.hbm
            # The tensor between the factors is only as wide as the rank, so its transfer takes the time of any small
            # message.
            message = self.c.collective_us * 1e-6 if ranks > 1 else 0.0
            total += Passes(share * (forward + message), share * (backward + message))
        return total

    def _thin(self, rows: float, k: float, n: float) -> float:
        """The seconds of a product with one side as short as an adapter's rank: the time of its FLOPs or of its operands'
        traffic, whichever is longer."""
        seconds = 2 * rows * k * n / self.rate16
        return max(seconds, self.element * (rows * k + k * n + rows * n) / self.job.gpu.hbm)

    # ----------------------------------------------------------------------------------------------------- kinds of parts

    def of(self, part: Part) -> Iterator[tuple[str, Passes]]:
        """The seconds of one part of the model by kind of kernel, without the exchange of tokens between experts."""
        if isinstance(part, Attention | LatentAttention):
            yield "projections", self.chain(*part.linears)
            yield "core attention", self.core_attention(part)
            yield "elementwise", self.around_attention(part)
            yield "context parallel", self.context_parallel(part)
        elif isinstance(part, Experts):
            yield "elementwise", self.norm()
            yield "experts", self.experts(part)
        elif isinstance(part, MLP):
            yield "elementwise", self.norm()
            yield "feed-forward", self.feed_forward(part)
        elif isinstance(part, Mixer | DeltaNet):
            yield "elementwise", self.norm()
            yield "mixers" if isinstance(part, Mixer) else "linear attention", self.recurrence(part)
        elif isinstance(part, Projection):
            yield "projections", self.chain(*part.linears)
            if part.joins:
                return
            yield "elementwise", self.norm()
        else:
            raise TypeError(f"The planner has no kernels for the model part {type(part).__name__}.")
        if self.job.adapters is not None:
            yield "adapters", self.adapters(part)
        # With sequence parallelism routed experts take their tokens from the shards. Only shared experts need them
        # gathered.
        if not isinstance(part, Experts) or part.shared is not None:
            yield "tensor parallel", self.tensor_parallel()

    def recomputed(self, part: Part, travel: float) -> float:
        """The seconds of a part's forward that selective recomputation repeats.

        Args:
            travel: The seconds of the forward's exchange of tokens between experts.
        """
        job, seconds = self.job, 0.0
        if isinstance(part, Attention | LatentAttention) and job.recomputes("core_attn") and job.keeps_scores:
            seconds += self.core_attention(part).forward
        if isinstance(part, LatentAttention) and job.recomputes("mla_up_proj"):
            seconds += self.chain(*(linear for linear in part.linears if linear.name == "linear_kv_up_proj")).forward
        if isinstance(part, MLP) and job.recomputes("mlp"):
            seconds += self.feed_forward(part).forward + self.tensor_parallel().forward
        if isinstance(part, Experts) and job.recomputes("moe"):
            seconds += self.experts(part).forward + travel
        elif isinstance(part, Experts):
            if job.recomputes("moe_act"):
                seconds += self.moving(self.routed_rows(part) * self.c.inner_bytes * part.width / job.etp).forward
            if job.recomputes("shared_experts") and part.shared is not None:
                seconds += self.feed_forward(part.shared).forward
        if job.recomputes("layernorm") and not isinstance(part, Mixer):
            seconds += self.norm().forward
        return seconds


def seen(part: _AnyAttention, seq: int) -> float:
    """The computed share of the causal scores: 1 for full causal attention.

    A window limits a query to ``part.window`` keys. A causal query attends to ``seq / 2`` keys on average, so the share
    of a window is twice its width over ``seq``.
    """
    return 1.0 if part.window is None else min(1.0, 2 * part.window / seq)


def layers_time(shape: ModelShape, job: Job, c: Constants) -> dict[str, float]:
    """The seconds of a stage's mean share of the layers for one micro-batch, by part, with recomputation as a part."""
    kernels = Kernels(shape, job, c)
    parts: dict[str, float] = {}
    counts = {part: number / job.pp for part, number in shape.parts.items()}
    times = {part: list(kernels.of(part)) for part in counts}
    exchanges: dict[Part, float] = {
        part: kernels.expert_parallel(part).total for part in counts if isinstance(part, Experts)
    }
    for part, count in counts.items():
        for name, passes in times[part]:
            parts[name] = parts.get(name, 0.0) + count * passes.total
    travel = sum(counts[part] * seconds for part, seconds in exchanges.items())
    exposed = 1.0
    if job.overlap_ep and travel:
        exposed = max(c.ep_exposed, 1 - c.dp_hidden * sum(parts.values()) / travel)
    parts["expert parallel"] = exposed * travel
    full = job.recompute == "full"
    repeated = {part: number / job.pp for part, number in again(shape, job).items()} if full else counts

    def recomputed(part: Part) -> float:
        exchange = exposed * exchanges.get(part, 0.0) / 2
        return (
            sum(passes.forward for _, passes in times[part]) + exchange if full else kernels.recomputed(part, exchange)
        )

    return {**parts, "recomputation": sum(count * recomputed(part) for part, count in repeated.items())}


def again(shape: ModelShape, job: Job) -> Mapping[Part, int]:
    """The parts of layers that full recomputation repeats, as in Megatron-Core's ``TransformerBlock``.

    "uniform" repeats all layers, including those of multi-token prediction. "block" repeats the first layers of each
    chunk. If the number of chunks doesn't divide the layers, the last chunks are shorter.
    """
    if job.recompute_method == "uniform":
        return shape.parts
    layers = len(shape.layers)
    chunk = math.ceil(layers / (job.pp * job.vp))
    return shape.parts_of(index for index in range(layers) if index % chunk < job.recompute_layers)
