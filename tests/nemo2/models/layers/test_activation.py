# SPDX-License-Identifier: Apache-2.0
"""Activations by their formulas, and soft caps of logits."""

import math
import pickle

import torch

from nemo2.llm.fn import openai_gelu, quick_gelu, squared_relu
from nemo2.models import Gemma2Config2B, GPTOSSConfig, GPTOSSConfig20B, NemotronHConfig8B
from nemo2.models.layers.logits import cap_logits

X = torch.linspace(-3, 3, 13, dtype=torch.float64)


def test_activations_are_the_very_functions_that_configurations_use_and_are_compared_with():
    """Compiled or not: a module that was imported before the CPU's backend came has Megatron-Core's functions compiled."""
    from nemo2.base.backend.compilation import uncompiled
    from nemo2.llm import fn

    for name, config in (
        ("openai_gelu", Gemma2Config2B),
        ("quick_gelu", GPTOSSConfig),
        ("squared_relu", NemotronHConfig8B),
    ):
        default = config.__dataclass_fields__["activation_func"].default
        assert uncompiled(getattr(fn, name)) is uncompiled(default), name


@torch.compiler.set_stance("force_eager")  # each would be compiled for some seconds
def test_activations_are_their_formulas():
    for x, relu, tanh, quick in zip(X.tolist(), squared_relu(X), openai_gelu(X), quick_gelu(X), strict=True):
        assert relu == max(x, 0.0) ** 2
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        assert math.isclose(tanh, 0.5 * x * (1 + math.tanh(inner)), abs_tol=1e-12)
        assert math.isclose(quick, x / (1 + math.exp(-1.702 * x)), abs_tol=1e-12)


@torch.compiler.set_stance("force_eager")
def test_the_gate_of_an_expert_is_bounded_from_above_only():
    """GPT-OSS, whose gate and linear part are every second column."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from nemo2.models.layers.experts import _activated

    gate, linear = 5 * X, -5 * X
    theirs = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    expected = theirs._apply_gate(torch.stack([gate, linear], dim=-1).flatten(-2))
    torch.testing.assert_close(_activated(torch.cat([gate, linear]), GPTOSSConfig20B()), expected)


class Output(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 10 * x, None


def test_logits_are_capped_and_the_layer_still_travels():
    layer = Output()
    cap_logits(layer, 5.0)
    for capped in (layer, pickle.loads(pickle.dumps(layer))):
        logits, bias = capped(X)
        assert bias is None
        torch.testing.assert_close(logits, 5.0 * torch.tanh(2 * X))
