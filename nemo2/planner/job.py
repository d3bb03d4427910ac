# SPDX-License-Identifier: Apache-2.0
"""The job of a training step, its batch, layout and GPUs: the planner's input beside the model's shape."""

import dataclasses
import math
from typing import Literal, Optional

from nemo2.gpus import GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Pairs of matrices that are trained beside linear layers (LoRA, arXiv:2106.09685).

    Attributes:
        rank: of each pair.
        beside: names of linear layers (``"linear_qkv"``); of the layers of a name the share that has a pair, and how many first
            matrices that pair has: canonical LoRA has one for each part of a fused layer.
        lengths: rows of the sum of both weights keep a trained length (DoRA, arXiv:2402.09353), which reads the weight.
        dropped: channels of the layer's input ("pre") or of the addition ("post") are dropped; masks are kept. None: nothing is.
    """

    rank: int
    beside: tuple[tuple[str, float, float], ...]
    lengths: bool = False
    dropped: Optional[Literal["pre", "post"]] = None

    def of(self, name: str) -> tuple[float, float]:
        """Share and first matrices of the linear layer ``name``, whose last part counts."""
        last = name.rpartition(".")[2]
        return next(((share, firsts) for one, share, firsts in self.beside if one == last), (0.0, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One way of training on one kind of GPU.

    Attributes:
        gpus: GPUs in all. `gpus == dp * tp * pp * cp`.
        precision: of the linear layers: "fp32", "bf16" (and fp16), "fp8" or "fp4". Attention and the output layer run in 16
            bits where these do in fewer.
        seq: tokens of a sequence.
        global_batch, micro_batch: sequences of a step, and of a forward pass.
        vp: model chunks of a pipeline rank.
        sharding: "replicated" (DDP), "zero1" (distributed optimizer) or "fsdp" (ZeRO-3).
        recompute: "none", "selective" (`recomputed` parts) or "full" (whole layers' forward once more).
        recomputed: with "selective": Megatron-Core's names of what is computed again: "core_attn", "mlp", "moe", "moe_act",
            "shared_experts", "layernorm", "mla_up_proj".
        recompute_method, recompute_layers: with "full": "uniform" computes every layer again and keeps the input of each group
            of so many; "block" computes the first so many layers of each chunk again, and keeps all of the others.
        offloaded_layers: the first so many layers keep their activations on the host.
        attention: "flash" (fused, nothing quadratic kept, by the GPU's best kernel: Transformer Engine's), "flash2" and "flash1"
            (FlashAttention's second and first version), "softmax" (scores are kept, the
            softmax is one kernel) or "eager" (scores are kept, kernel by kernel).
        overlap_grad, overlap_param: data-parallel reduction and gathering run beside the computation.
        overlap_tp: tensor-parallel collectives run beside the matrix products (userbuffers).
        overlap_pp: sends between stages run beside the computation.
        dispatch: how tokens travel to their experts: "alltoall", a copy for every expert they go to, or "once", one for every
            rank and between machines one for every machine (DeepEP, HybridEP).
        overlap_ep: tokens travel to their experts beside the computation of another micro-batch.
        capacity: experts take a fixed number of tokens (others are dropped), which the host need not wait to know.
        fused_experts: activations and casts of routed experts run within their grouped products' kernels, of all experts at once.
        grad_bytes: bytes of a gradient element in the buffers and in the data-parallel reduction.
        state_bytes: bytes per weight of the optimizer: fp32 weights and two fp32 moments make 12.
        network: bytes per second and direction of a GPU's network adapter, None for the GPU's usual one.
        cuda_graphs: kernels are replayed, not launched one by one, but for those of routed experts.
        graphed_experts: those of routed experts too: graphs of a whole step, or fixed capacity.
        low_attention: attention runs in 8 bits.
        compiled: elementwise kernels are fused by a compiler or by hand (Transformer Engine, torch.compile, XLA).
        gate_kept: the activated gate of a feed-forward block is a tensor of its own, kept for the product with the other half.
        torch_loss: every tensor-parallel rank has all logits and torch's cross entropy, not its slice and Megatron-Core's.
        dropout: dropout is applied, and its masks are kept.
        document: tokens of the documents that sequences are packed of, which don't attend to each other. None: one document.
        scattered_sends: between stages each tensor-parallel rank sends its share of an activation, sequence parallel or not.
        lora: the base weights are frozen: no weight gradients, no reduction of them.
        adapters: what is trained beside them. None: so little that it isn't counted.
    """

    gpu: GPU
    gpus: int
    seq: int
    global_batch: int
    micro_batch: int
    precision: str = "bf16"
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = True
    sharding: str = "zero1"
    recompute: str = "none"
    recomputed: tuple[str, ...] = ("core_attn",)
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    offloaded_layers: int = 0
    attention: str = "flash"
    overlap_grad: bool = True
    overlap_param: bool = True
    overlap_tp: bool = True
    overlap_pp: bool = True
    dispatch: str = "alltoall"
    overlap_ep: bool = False
    capacity: bool = False
    fused_experts: bool = False
    grad_bytes: int = 4
    state_bytes: int = 12
    network: Optional[float] = None
    cuda_graphs: bool = False
    graphed_experts: bool = False
    low_attention: bool = False
    compiled: bool = True
    gate_kept: bool = False
    torch_loss: bool = False
    dropout: bool = False
    document: Optional[int] = None
    scattered_sends: bool = False
    lora: bool = False
    adapters: Optional[Adapters] = None

    @property
    def dp(self) -> int:
        return max(1, self.gpus // (self.tp * self.pp * self.cp))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each data-parallel replica."""
        return max(1, round(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank, before tensor parallelism."""
        return self.micro_batch * self.seq / self.cp

    @property
    def attended(self) -> int:
        """Tokens that attend to each other: of a packed document, or of the sequence."""
        return min(self.seq, self.document or self.seq)

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which the tokens between two blocks are split."""
        return self.tp if self.sp else 1

    @property
    def loss_ranks(self) -> int:
        """Ranks over which the logits are split when the loss is computed."""
        return 1 if self.torch_loss else self.tp

    @property
    def adapter(self) -> float:
        return self.network or self.gpu.network

    @property
    def low_precision(self) -> bool:
        """Whether linear layers run in fewer than 16 bits: where the GPU has no such rate, they run in 16."""
        return self.precision in ("fp8", "fp4") and self.precision in self.gpu.flops

    @property
    def keeps_scores(self) -> bool:
        """Whether attention writes its score matrix out."""
        return self.attention in ("eager", "softmax")

    def recomputes(self, part: str) -> bool:
        """Whether ``part``, one of Megatron-Core's names, is computed again on the way back by itself."""
        return self.recompute == "selective" and part in self.recomputed

    def computed_again(self, layers: int) -> range:
        """The layers of a chunk that the backward pass recomputes whole."""
        if self.recompute != "full":
            return range(0)
        return range(layers if self.recompute_method == "uniform" else min(self.recompute_layers, layers))

    def kept_inputs(self, layers: float) -> float:
        """Inputs of layers, or of groups of them, that a chunk of so many keeps to compute them again."""
        if self.recompute != "full":
            return 0.0
        if self.recompute_method == "block":
            return min(self.recompute_layers, layers)
        return math.ceil(layers / self.recompute_layers) if self.recompute_layers > 1 else layers
