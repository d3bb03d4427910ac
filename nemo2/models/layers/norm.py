# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm in plain PyTorch, for every kind of parallelism.

Megatron-Core's substitute (`WrappedTorchNorm`) rejects sequence parallelism and zero-centered weights. With sequence
parallelism each tensor-parallel rank normalizes only its part of the sequence, so a weight's gradient is a partial sum.
`finalize_model_grads` adds up the gradients of weights with `sequence_parallel = True`.
"""

from functools import partial
from typing import Any, ClassVar, Optional

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError


class TorchNorm(torch.nn.Module):
    """The norm that `config.normalization` names, over the last dimension.

    LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias (Ba et al., arXiv:1607.06450). RMSNorm:
    x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv:1910.07467). With `layernorm_zero_centered_gamma` the
    stored weight is the distance from one. Arithmetic is done in the wider of the input's and the weight's type, and
    the answer has the weight's, which is what the linear layer that follows expects.

    The signature is the one that Megatron-Core's layer builders call; all but `hidden_size` and `eps` come from
    `config`, and an argument that contradicts it is refused.

    Raises:
        ConfigError: `config.normalization` is neither of the two, or an argument contradicts `config`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: Optional[bool] = None,
        normalization: Optional[str] = None,
    ):
        super().__init__()
        del persist_layer_norm  # names a kernel, not a result
        _refuse_contradiction("normalization", normalization, config.normalization)
        _refuse_contradiction("zero_centered_gamma", zero_centered_gamma, config.layernorm_zero_centered_gamma)
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"normalization={config.normalization!r} is unknown; use 'LayerNorm' or 'RMSNorm'.")
        self.hidden_size = hidden_size
        self.eps = eps
        self.is_rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma

        # None lets a surrounding `with torch.device("meta")` decide, as in Megatron-Core's own layers.
        device = None if config.use_cpu_initialization else get_backend().device
        empty = torch.empty(hidden_size, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(empty)
        self.bias = None if self.is_rms else torch.nn.Parameter(torch.empty_like(empty))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity scale and no shift."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The normalized ``x``, ``[..., hidden_size]`` like ``x`` itself."""
        compute_dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(compute_dtype)
        if self.zero_centered:
            weight = weight + 1.0
        if self.is_rms:
            y = F.rms_norm(x.to(compute_dtype), (self.hidden_size,), weight, self.eps)
        else:
            bias = None if self.bias is None else self.bias.to(compute_dtype)
            y = F.layer_norm(x.to(compute_dtype), (self.hidden_size,), weight, bias, self.eps)
        return y.to(self.weight.dtype)

    def extra_repr(self) -> str:
        kind = "RMSNorm" if self.is_rms else "LayerNorm"
        return f"{kind}, {self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"


class UnbiasedNorm(TorchNorm):
    """A norm without a bias, whichever `config.normalization` is."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bias = None


class _NormOverHeads(TorchNorm):
    """An RMSNorm of queries or keys over the channels of all heads (OLMo 2, OLMoE, MiniMax M2), not of each head.

    Heads are spread over tensor-parallel ranks, which add up their squares. Each rank holds the whole weight and uses the part
    of its heads: Megatron-Core adds the gradients of weights of this name over the ranks.

    Raises:
        ConfigError: the ranks don't have the same number of heads, or the norm isn't an RMSNorm.
    """

    heads_field: ClassVar[str]

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        heads = getattr(config, self.heads_field) or config.num_attention_heads
        self.ranks = config.tensor_model_parallel_size
        if config.normalization != "RMSNorm" or heads % self.ranks:
            raise ConfigError(
                f"qk_layernorm_over_heads=True needs normalization='RMSNorm', which is {config.normalization!r}, and "
                f"{self.heads_field}={heads} as a multiple of tensor_model_parallel_size={self.ranks}."
            )
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """The normalized ``x``, ``[..., heads of this rank, channels]``."""
        own = x.flatten(-2).to(torch.promote_types(x.dtype, self.weight.dtype))
        squares, weight = own.square().sum(dim=-1, keepdim=True), self.weight
        if self.ranks > 1:
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
            weight = weight.narrow(0, get_tensor_model_parallel_rank() * own.size(-1), own.size(-1))
        scale = torch.rsqrt(squares / self.hidden_size + self.eps)
        return (own * scale * (weight + 1.0 if self.zero_centered else weight)).view(x.shape).to(self.weight.dtype)


class QueryNormOverHeads(_NormOverHeads):
    heads_field = "num_attention_heads"


class KeyNormOverHeads(_NormOverHeads):
    heads_field = "num_query_groups"


class NormAfterRotation(TorchNorm):
    """A norm of queries or keys, head by head, that `normalize_after_rotation` applies (Hunyuan). Where Megatron-Core's
    attention calls it, before the rotation, it leaves them unchanged."""

    def forward(self, x: Tensor, *, rotated: bool = False) -> Tensor:
        return super().forward(x) if rotated else x


def normalize_after_rotation(attention: torch.nn.Module) -> None:
    """Make an attention's core normalize its queries and keys. With a cache, which holds keys before their norm, all keys are
    normalized again in each call."""
    from nemo2.models.layers.queries import change_queries_and_keys

    layer: Any = attention
    change_queries_and_keys(layer.core_attention, partial(_normalized, layer))


def _normalized(attention: Any, query: Tensor, key: Tensor, packed: Any) -> tuple[Tensor, Tensor]:
    # By their names in the attention: a wrapper that gathers weights for a call may stand there.
    return attention.q_layernorm(query, rotated=True), attention.k_layernorm(key, rotated=True)


def _refuse_contradiction(name: str, argument: object, configured: object) -> None:
    if argument is not None and argument != configured:
        raise ConfigError(f"TorchNorm got {name}={argument!r}, but its config says {configured!r}: don't pass {name}.")
