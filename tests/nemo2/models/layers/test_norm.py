# SPDX-License-Identifier: Apache-2.0
"""TorchNorm against the formulas of its papers, written out."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.errors import ConfigError
from nemo2.models.layers.norm import NormAfterRotation, TorchNorm, normalize_after_rotation

EPS = 1e-5


def build(**fields) -> TorchNorm:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **fields)
    norm = TorchNorm(config, hidden_size=8, eps=EPS)
    generator = torch.Generator().manual_seed(3)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return norm


def by_hand(norm: TorchNorm, x: torch.Tensor) -> torch.Tensor:
    weight = norm.weight.double() + (1.0 if norm.zero_centered else 0.0)
    x = x.double()
    if norm.bias is None:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + norm.bias.double()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_values_and_gradients(normalization, zero_centered):
    norm = build(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = [x, *norm.parameters()]
    actual, expected = norm(x), by_hand(norm, x)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(actual.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("zero_centered", "stored"), [(False, 1.0), (True, 0.0)])
def test_it_starts_as_the_identity_scale(zero_centered, stored):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, layernorm_zero_centered_gamma=zero_centered
    )
    norm = TorchNorm(config, hidden_size=8)
    assert norm.bias is not None
    assert torch.all(norm.weight == stored) and torch.all(norm.bias == 0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weights_say_whether_their_gradients_are_partial(sequence_parallel):
    norm = build(sequence_parallel=sequence_parallel, tensor_model_parallel_size=2)
    assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel] * 2


def test_half_precision_is_accumulated_wider_and_returned_in_the_weights_type():
    norm = build(normalization="RMSNorm", params_dtype=torch.bfloat16, bf16=True)
    residual = torch.randn(5, 8) * 100
    assert norm.weight.dtype == torch.bfloat16
    for x in (residual, residual.bfloat16()):
        assert norm(x).dtype == torch.bfloat16
        torch.testing.assert_close(norm(x).float(), by_hand(norm, x).float(), rtol=2**-7, atol=1e-3)


def test_on_the_meta_device_it_costs_nothing():
    with torch.device("meta"):
        assert build_on_meta().weight.device.type == "meta"


def build_on_meta() -> TorchNorm:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    return TorchNorm(config, hidden_size=8)


def test_other_norms_and_contradictions_are_refused():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    with pytest.raises(ConfigError, match="normalization='RMSNorm', but its config says 'LayerNorm'"):
        TorchNorm(config, hidden_size=8, normalization="RMSNorm")
    with pytest.raises(ConfigError, match="zero_centered_gamma=True"):
        TorchNorm(config, hidden_size=8, zero_centered_gamma=True)
    config.normalization = "BatchNorm"
    with pytest.raises(ConfigError, match="'BatchNorm' is unknown"):
        TorchNorm(config, hidden_size=8)


def test_norms_after_the_rotation_are_called_through_what_wraps_them():
    class Halved(torch.nn.Module):
        def __init__(self, inside: torch.nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, *arguments, **options):
            return self.inside(*arguments, **options) / 2

    class Core(torch.nn.Module):
        def forward(self, query, key):
            return query, key

    attention: Any = torch.nn.Module()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm")
    attention.q_layernorm, attention.k_layernorm = (NormAfterRotation(config, hidden_size=8, eps=EPS) for _ in "qk")
    attention.core_attention = Core()
    normalize_after_rotation(attention)
    attention.q_layernorm = Halved(attention.q_layernorm)
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = by_hand(attention.k_layernorm, x).float()
    torch.testing.assert_close(attention.core_attention(x, x), (expected / 2, expected), rtol=1e-6, atol=1e-6)
