# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm in plain PyTorch, for every kind of parallelism.

Megatron-Core's substitute (`WrappedTorchNorm`) rejects sequence parallelism and zero-centered weights. With sequence
parallelism each tensor-parallel rank normalizes only its part of the sequence, so a weight's gradient is a partial sum.
`finalize_model_grads` adds up the gradients of weights with `sequence_parallel = True`.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo2.backend import get_backend
from nemo2.errors import ConfigError


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
        if self.bias is None:
            y = F.rms_norm(x.to(compute_dtype), (self.hidden_size,), weight, self.eps)
        else:
            y = F.layer_norm(x.to(compute_dtype), (self.hidden_size,), weight, self.bias.to(compute_dtype), self.eps)
        return y.to(self.weight.dtype)

    def extra_repr(self) -> str:
        kind = "RMSNorm" if self.is_rms else "LayerNorm"
        return f"{kind}, {self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"


def _refuse_contradiction(name: str, argument: object, configured: object) -> None:
    if argument is not None and argument != configured:
        raise ConfigError(f"TorchNorm got {name}={argument!r}, but its config says {configured!r}: don't pass {name}.")
