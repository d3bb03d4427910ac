# SPDX-License-Identifier: Apache-2.0
"""The experts of a rank: one after the other, or all of them in two matrix products instead of two per expert.

Megatron-Core's grouped experts need Transformer Engine or a CUDA extension. `torch.nn.functional.grouped_mm` does the same
product in plain PyTorch. The parameters stay those of `SequentialMLP`, so a checkpoint fits either.
"""

from typing import Any, Optional

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)


class LocalExperts(SequentialMLP):
    """The experts of this rank one after the other, called as Megatron-Core's `SequentialMLP`.

    Biases differ from there in three ways. Megatron-Core marks the bias of every row-parallel layer as one that each
    tensor-parallel rank uses for a part of the sequence, whose gradients are to be summed over those ranks. They hold
    other experts (0.16.1 and 0.19.2: the sum of two experts' gradients went to both). 0.16.1 also takes it for a copy that
    only the first of those ranks counts in the gradient norm. And without expert parallelism it adds the bias in place to
    a view, which autograd refuses.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            layer: Any = expert.linear_fc2
            if layer.bias is not None:
                layer.bias.sequence_parallel = False
                layer.bias.tensor_model_parallel = True

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Optional[Tensor]]:
        """
        Args:
            permuted_local_hidden_states: `[tokens, hidden]`, sorted by expert.
            tokens_per_expert: `[experts]`, how many each has.
            permuted_probs: `[tokens]`, the router's weight of each.

        Returns:
            `[tokens, hidden]`, this expert-tensor-parallel rank's part of the sum, weighted; and None, for the bias is in.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), torch.ones_like(probs)
        return self._run(x, tokens_per_expert, probs.unsqueeze(-1)), None

    def _run(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Tensor:
        """`probs` is `[tokens, 1]`. An expert without tokens runs too: the reduction of gradients waits for it."""
        counts = tokens_per_expert.tolist()
        outputs = []
        for expert, tokens, weights in zip(self.local_experts, x.split(counts), probs.split(counts), strict=True):
            layers: Any = expert
            h, bias = layers.linear_fc1(tokens)
            h = self._activate(h, bias, weights)
            out, bias = layers.linear_fc2(h)
            outputs.append(self._with_bias(out, bias, weights))
        return torch.cat(outputs)

    def _activate(self, h: Tensor, bias: Optional[Tensor], weights: Tensor) -> Tensor:
        h = _activated(h if bias is None else h + bias, self.config)
        return (h * weights).to(h.dtype)

    def _with_bias(self, out: Tensor, bias: Optional[Tensor], weights: Tensor) -> Tensor:
        return out if bias is None else (out + bias * weights).to(out.dtype)


class TorchGroupedMLP(LocalExperts):
    """The experts of this rank as one product per layer.

    Weights are stacked anew in each call, one copy of the experts; the products then run as one kernel each. Where torch
    has no `grouped_mm` (before 2.10), its rows aren't of 16 bytes each or a multiple, or an expert's layers were replaced
    by others (adapters, say), the experts run one after the other.
    """

    def _run(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Tensor:
        if not self._can_group() or x.size(0) == 0:
            return super()._run(x, tokens_per_expert, probs)
        for expert in self.local_experts:
            for layer in (expert.linear_fc1, expert.linear_fc2):
                _run_forward_pre_hooks(layer)
        counts = tokens_per_expert.to(device=x.device, dtype=torch.int32)
        ends = counts.cumsum(0, dtype=torch.int32)
        h = self._product(x, "linear_fc1", ends)
        h = self._activate(h, self._bias("linear_fc1", counts, x.size(0)), probs)
        return self._with_bias(self._product(h, "linear_fc2", ends), self._bias("linear_fc2", counts, x.size(0)), probs)

    def _product(self, x: Tensor, layer: str, ends: Tensor) -> Tensor:
        return _grouped_mm(x, self._stacked(layer, "weight").transpose(1, 2), offs=ends)

    def _bias(self, layer: str, counts: Tensor, num_tokens: int) -> Optional[Tensor]:
        """`[tokens, width]`, each token's expert's bias; None without biases."""
        if not self.config.add_bias_linear:
            return None
        return self._stacked(layer, "bias").repeat_interleave(counts, dim=0, output_size=num_tokens)

    def _stacked(self, layer: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(expert, layer), name) for expert in self.local_experts])

    def _can_group(self) -> bool:
        # `grouped_mm` takes rows of a multiple of 16 bytes.
        return _grouped_mm is not None and all(
            type(layer) is kind and layer.weight.size(1) * layer.weight.element_size() % 16 == 0
            for expert in self.local_experts
            for layer, kind in ((expert.linear_fc1, ColumnParallelLinear), (expert.linear_fc2, RowParallelLinear))
        )


def _activated(x: Tensor, config: Any) -> Tensor:
    """`[..., ffn]` from `[..., ffn]`, or from `[..., 2 * ffn]` with `gated_linear_unit`: act(first half) * second half.

    `activation_func_clamp_value` bounds the first half from above and the second on both sides, and
    `glu_linear_offset` is added to the second (gpt-oss uses both).
    """
    if not config.gated_linear_unit:
        return config.activation_func(x)
    gate, linear = x.chunk(2, dim=-1)
    bound = config.activation_func_clamp_value
    if bound is not None:
        gate, linear = gate.clamp(max=bound), linear.clamp(min=-bound, max=bound)
    return config.activation_func(gate) * (linear + config.glu_linear_offset)


def _run_forward_pre_hooks(layer: Any) -> None:
    """The hooks that a call of ``layer`` would run first, for a layer whose parameters are read without calling it.

    Megatron-Core's DistributedDataParallel waits in such a hook for the all-gather of the layer's parameters
    (``overlap_param_gather``) and starts the next one. Without the hook the product would use the parameters of the step
    before.
    """
    for key, hook in layer._forward_pre_hooks.items():
        hook(layer, (), {}) if key in layer._forward_pre_hooks_with_kwargs else hook(layer, ())
