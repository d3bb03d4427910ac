# SPDX-License-Identifier: Apache-2.0
"""The job of a training step: its batch, layout and GPUs. The planner's second input, beside the model's shape."""

import dataclasses
import math
from typing import Literal, Optional

from nemo2.base.gpus import GPU
from nemo2.mcore.parallel.layout import SIZE_FIELDS, Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """Pairs of matrices that are trained beside linear layers (LoRA, arXiv:2106.09685).

    Attributes:
        rank: the rank of each pair.
        beside: names of linear layers (``"linear_qkv"``). Each has the fraction of the layers of this name that have a
            pair, and the number of first matrices in the pair. Canonical LoRA has one for each part of a fused layer.
        lengths: the rows of the sum of both weights have a trained length (DoRA, arXiv:2402.09353), which reads the
            weight.
        dropped: where dropout applies: to the layer's input ("pre") or to the adapter's output ("post"). Masks are
            kept. None: no dropout.
    """

    rank: int
    beside: tuple[tuple[str, float, float], ...]
    lengths: bool = False
    dropped: Optional[Literal["pre", "post"]] = None

    def of(self, name: str) -> tuple[float, float]:
        """The fraction and the number of first matrices for the linear layer ``name``, by the last part of its name."""
        last = name.rpartition(".")[2]
        return next(((share, firsts) for one, share, firsts in self.beside if one == last), (0.0, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One way to train on one kind of GPU.

    Attributes:
        gpu: the kind of GPU.
        gpus: the total number of GPUs. `gpus == dp * tp * pp * cp`.
        precision: the precision of the linear layers: "fp32", "bf16" (and fp16), "fp8" or "fp4". With fewer than 16
            bits, attention and the output layer run in 16 bits.
        seq: tokens per sequence.
        global_batch: sequences per step, over all ranks.
        micro_batch: sequences per forward of a rank.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        vp: model chunks per pipeline rank.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        etp: tensor-parallel ranks inside an expert.
        sp: activations between matrix products are sharded over the tensor-parallel ranks.
        sharding: "replicated" (DDP), "zero1" (distributed optimizer) or "fsdp" (ZeRO-3).
        recompute: "none", "selective" (the parts in `recomputed`) or "full" (the whole forward of layers).
        recomputed: with "selective", Megatron-Core's names of the recomputed parts: "core_attn", "mlp", "moe",
            "moe_act", "shared_experts", "layernorm", "mla_up_proj".
        recompute_method: with "full". "uniform" recomputes every layer and keeps the input of each group of
            `recompute_layers`. "block" recomputes the first `recompute_layers` of each chunk, and keeps all activations
            of the other layers.
        recompute_layers: the number of layers that `recompute_method` counts with.
        offloaded_layers: the number of first layers that keep their activations on the host.
        attention: "flash" (fused, keeps nothing quadratic, with the GPU's best kernel: Transformer Engine's), "flash2"
            and "flash1" (the second and first version of FlashAttention), "softmax" (scores are kept, the softmax is
            one kernel) or "eager" (scores are kept, kernel by kernel).
        overlap_grad, overlap_param: the data-parallel reduction and the gather overlap with computation.
        overlap_tp: tensor-parallel collectives overlap with matrix products (userbuffers).
        overlap_pp: sends between stages overlap with computation.
        dispatch: how tokens travel to their experts. "alltoall": one copy for each expert. "once": one copy for each
            rank, and between machines one for each machine (DeepEP, HybridEP).
        overlap_ep: the dispatch of tokens overlaps with the computation of another micro-batch.
        capacity: experts take a fixed number of tokens and drop others, so the host need not wait for the counts.
        fused_experts: activations and casts of all routed experts run within the kernels of their grouped products.
        grad_bytes: bytes per gradient element in the buffers and in the data-parallel reduction.
        state_bytes: the optimizer's bytes per weight: fp32 weights and two fp32 moments make 12.
        network: bytes per second and direction of a GPU's network adapter. None: the GPU's usual adapter.
        cuda_graphs: kernels are replayed rather than launched one by one, except those of routed experts.
        graphed_experts: kernels of routed experts are replayed too, with graphs of a whole step or a fixed capacity.
        low_attention: attention runs in 8 bits.
        compiled: elementwise kernels are fused by a compiler or by hand (Transformer Engine, torch.compile, XLA).
        gate_kept: the activated gate of a feed-forward block is a separate tensor, kept for the product with the other
            half.
        torch_loss: every tensor-parallel rank holds all logits and uses torch's cross entropy, rather than its slice
            and Megatron-Core's.
        dropout: dropout is applied, and its masks are kept.
        document: tokens per document in packed sequences, whose documents don't attend to each other. None: one
            document.
        scattered_sends: between stages each tensor-parallel rank sends its shard of an activation, with or without
            sequence parallelism.
        lora: the base weights are frozen, so they have no weight gradients and no reduction.
        adapters: the trained adapters. None: so small that they aren't counted.
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

    @staticmethod
    def sizes_of(layout: Layout) -> dict[str, int]:
        """The fields of a job with this layout, but `sp`."""
        fixed = {"vp": layout.vp or 1, "etp": layout.expert_tensor_size}
        return {short: getattr(layout, short) for short in SIZE_FIELDS} | fixed

    @property
    def dp(self) -> int:
        return max(1, self.gpus // (self.tp * self.pp * self.cp))

    @property
    def micro_batches(self) -> int:
        """The micro-batches per step on each data-parallel replica."""
        return max(1, round(self.global_batch / (self.dp * self.micro_batch)))

    @property
    def tokens(self) -> float:
        """The tokens of one micro-batch on one rank, before tensor parallelism."""
        return self.micro_batch * self.seq / self.cp

    @property
    def attended(self) -> int:
        """The number of tokens that attend to each other: those of a packed document, or of the sequence."""
        return min(self.seq, self.document or self.seq)

    @property
    def sequence_ranks(self) -> int:
        """The ranks over which the tokens between two blocks are sharded."""
        return self.tp if self.sp else 1

    @property
    def loss_ranks(self) -> int:
        """The ranks over which the logits are sharded when the loss is computed."""
        return 1 if self.torch_loss else self.tp

    @property
    def adapter(self) -> float:
        return self.network or self.gpu.network

    @property
    def low_precision(self) -> bool:
        """Whether linear layers run in fewer than 16 bits. On a GPU without such a rate they run in 16."""
        return self.precision in ("fp8", "fp4") and self.precision in self.gpu.flops

    @property
    def keeps_scores(self) -> bool:
        """Whether attention writes its score matrix to memory."""
        return self.attention in ("eager", "softmax")

    def recomputes(self, part: str) -> bool:
        """Whether the backward recomputes ``part``, one of Megatron-Core's names, by itself."""
        return self.recompute == "selective" and part in self.recomputed

    def kept_inputs(self, layers: float) -> float:
        """The inputs of layers, or of groups of layers, that a chunk of this many layers keeps for recomputation."""
        if self.recompute != "full":
            return 0.0
        if self.recompute_method == "block":
            return min(self.recompute_layers, layers)
        return math.ceil(layers / self.recompute_layers) if self.recompute_layers > 1 else layers
