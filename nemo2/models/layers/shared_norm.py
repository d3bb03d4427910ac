# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention and feed-forward read the same normalized input, and are added to the residual stream together (Cohere).

Megatron-Core's layer adds them one after the other, each behind a norm of its own: x + attention(norm(x)), then the
feed-forward of the sum's norm. If the second norm gives what the first one gave, the layer computes
x + attention(norm(x)) + feed-forward(norm(x)).
"""

from typing import Any, Optional

from megatron.core.transformer import ModuleSpec
from torch import Tensor, nn

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.cuda_graphs import modules_of
from nemo2.models.layers.norm import UnbiasedNorm
from nemo2.models.layers.spec import changed_layer_spec


class SharedNorm(UnbiasedNorm):
    """The norm in front of both, which keeps its output until `take`."""

    _output: Optional[Tensor] = None

    def forward(self, x: Tensor) -> Tensor:
        self._output = super().forward(x)
        return self._output

    def take(self) -> Tensor:
        output, self._output = self._output, None
        assert output is not None, "attention comes first"
        return output


class OutputOfSharedNorm(nn.Module):
    """Stands where the feed-forward's norm would, and gives what the layer's `SharedNorm` gave."""

    take: Any

    def __init__(self, **unused: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return self.take()


def parallel_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers of a config with ``pre_sublayer_layernorm=False``, with one `SharedNorm` each. `share_norms` is to be
    called on the built model."""

    def share_norm(parts: Any, number: int) -> None:
        parts.input_layernorm, parts.pre_mlp_layernorm = SharedNorm, OutputOfSharedNorm

    spec: Any = changed_layer_spec(config, share_norm, vp_stage=vp_stage)
    spec.submodules.layer_norm = UnbiasedNorm
    return spec


def share_norms(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.pre_mlp_layernorm.take = layer.input_layernorm.take


def check_shared_norms(config: Any) -> None:
    """
    Raises:
        ConfigError: a layer's norm would run apart from its feed-forward.
    """
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        raise ConfigError(
            f"model.config.recompute_modules={config.recompute_modules!r} has 'layernorm', which discards the output of a "
            "layer's norm after attention, but the feed-forward of this model reads it too. Remove 'layernorm'."
        )
    parts = modules_of(config)
    if config.cuda_graph_impl == "transformer_engine" and parts:
        raise ConfigError(
            f"model.config.cuda_graph_scope={','.join(parts)} captures parts of a layer, but attention and feed-forward of "
            "this model share a norm, so that they can't be captured apart. Leave cuda_graph_scope unset, which captures "
            "whole layers."
        )
