# SPDX-License-Identifier: Apache-2.0
"""Gemma 1: RMSNorm with weights around zero, gated GELU, wide heads, an embedding scaled by the root of its width.

Sources: arXiv:2403.08295, table 1; the released config.json files of google/gemma-2b and gemma-7b.
"""

from functools import partial
from typing import Any

from megatron.core.transformer.utils import openai_gelu
from torch import Tensor, nn

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class GemmaConfig(
    DecoderConfig,
    activation_func=openai_gelu,
    seq_length=8192,
    kv_channels=256,
    share_embeddings_and_output_weights=True,
    layernorm_zero_centered_gamma=True,
    # NeMo 2.0 leaves Megatron-Core's 1e-5.
    layernorm_epsilon=1e-6,
):
    """Settings that all Gemma models share, with the tanh approximation of GELU that the released weights use."""

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        if model.pre_process:
            model.embedding.register_forward_hook(partial(multiply, self.hidden_size**0.5))


class GemmaConfig2B(
    GemmaConfig, num_layers=18, hidden_size=2048, num_attention_heads=8, num_query_groups=1, ffn_hidden_size=16384
):
    """2.51 B parameters with the 256,000-token vocabulary; one key-value head for all queries."""


class GemmaConfig7B(
    GemmaConfig, num_layers=28, hidden_size=3072, num_attention_heads=16, num_query_groups=16, ffn_hidden_size=24576
):
    """8.54 B parameters with the 256,000-token vocabulary."""


class CodeGemmaConfig2B(GemmaConfig2B):
    """CodeGemma 2B, arXiv:2406.11409: Gemma's shape."""


class CodeGemmaConfig7B(GemmaConfig7B):
    """CodeGemma 7B, arXiv:2406.11409: Gemma's shape."""


class GemmaModel(GPTModel):
    """The LightningModule of Gemma; see `GPTModel`."""


def multiply(factor: float, module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """The embedding's output times a factor. As in the released weights, the factor is rounded to the tensor's
    dtype."""
    return embedded * embedded.new_tensor(factor)
