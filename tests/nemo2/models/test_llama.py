# SPDX-License-Identifier: Apache-2.0
"""Llama against a Llama written out in plain PyTorch, and rotary scaling against the published rule."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nemo2.models.llama import Llama31Config8B, Llama32Config1B
from nemo2.models.rotary import scale_rotary_frequencies

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 32,
    "vocab_size": 128,
}
SCALING = {"scale_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}


def published_scaling(frequencies: list[float], scale: float, low: float, high: float, old: int) -> list[float]:
    """The three cases as meta-llama/llama-models states them, by wavelength."""
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < old / high:
            scaled.append(frequency)
        elif wavelength > old / low:
            scaled.append(frequency / scale)
        else:
            smooth = (old / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / scale + smooth * frequency)
    return scaled


@pytest.mark.parametrize(
    ("scale", "low", "high", "old"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 3.0, 512)]
)
def test_rotary_scaling_is_the_published_rule(scale: float, low: float, high: float, old: int) -> None:
    frequencies = [500_000 ** (-i / 64) for i in range(64)]
    ours = scale_rotary_frequencies(
        torch.tensor(frequencies, dtype=torch.float64),
        scale_factor=scale, low_freq_factor=low, high_freq_factor=high, old_context_len=old,
    )  # fmt: skip
    assert ours.tolist() == pytest.approx(published_scaling(frequencies, scale, low, high, old), rel=1e-12)


def test_rotary_scaling_is_megatron_cores_where_that_can_say_it() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    frequencies = 1.0 / (500_000 ** (torch.arange(0, 128, 2).float() / 128))
    theirs = RotaryEmbedding._apply_scaling(None, frequencies, factor=8.0)
    torch.testing.assert_close(scale_rotary_frequencies(frequencies, **SCALING), theirs, rtol=1e-6, atol=0)


def plain_llama(weights: dict[str, torch.Tensor], config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a Llama, written from arXiv:2302.13971 and the grouped-query paper; weights in Megatron's layout."""
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    frequencies = torch.tensor([config.rotary_base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    if hasattr(config, "scale_factor"):
        scaled = published_scaling(
            frequencies.tolist(),
            config.scale_factor,
            config.low_freq_factor,
            config.high_freq_factor,
            config.old_context_len,
        )
        frequencies = torch.tensor(scaled, dtype=torch.float64)
    angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), frequencies)
    cos, sin = torch.cat([angles.cos()] * 2, -1).float(), torch.cat([angles.sin()] * 2, -1).float()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.layernorm_epsilon) * weight

    def rotate(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

    def of(layer: int, name: str) -> torch.Tensor:
        return weights[f"decoder.layers.{layer}.{name}"]

    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(config.num_layers):
        y = norm(x, of(layer, "input_layernorm.weight"))
        # Megatron keeps, per group: its queries, its key, its value.
        qkv = (y @ of(layer, "self_attention.linear_qkv.weight").T).unflatten(-1, (groups, heads // groups + 2, dim))
        query = rotate(qkv[..., :-2, :].flatten(2, 3))
        key, value = rotate(qkv[..., -2, :]), qkv[..., -1, :]
        key, value = (t.repeat_interleave(heads // groups, dim=2) for t in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(dim)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        attended = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~causal, -math.inf).softmax(-1), value)
        x = x + attended.flatten(2) @ of(layer, "self_attention.linear_proj.weight").T
        y = norm(x, of(layer, "pre_mlp_layernorm.weight"))
        gate, up = (y @ of(layer, "mlp.linear_fc1.weight").T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ of(layer, "mlp.linear_fc2.weight").T
    x = norm(x, weights["decoder.final_layernorm.weight"])
    return x @ weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"]).T


def both_logits_and_losses(name: str) -> dict[str, torch.Tensor]:
    from megatron.core import parallel_state, tensor_parallel

    from nemo2.base.backend import get_backend
    from nemo2.models import llama

    get_backend().install()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    # Few positions and an old context of 16: all three cases of the scaling occur.
    scaling = {"old_context_len": 16} if name != "Llama3Config8B" else {}
    config = getattr(llama, name)(**TINY, **scaling)
    chunk = config.configure_model(None)
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand_as(tokens)
    with torch.no_grad():
        weights = dict(chunk.state_dict())
        reference = plain_llama(weights, config, tokens)
        labels = tokens.roll(-1, dims=1)
        return {
            "ours": chunk(tokens, positions, None),
            "reference": reference,
            "our_loss": chunk(tokens, positions, None, labels=labels),
            "reference_loss": F.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction="none").view(2, 32),
        }


@pytest.mark.parametrize("name", ["Llama3Config8B", "Llama31Config8B", "Llama32Config1B"])
def test_a_tiny_llama_computes_what_the_papers_say(run_on_ranks: Any, name: str) -> None:
    result = run_on_ranks(both_logits_and_losses, 1, name)[0]
    torch.testing.assert_close(result["ours"], result["reference"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result["our_loss"], result["reference_loss"], rtol=1e-4, atol=1e-5)


def test_small_llama_3_2_ties_its_embedding_and_stretches_further() -> None:
    small, large = Llama32Config1B(), Llama31Config8B()
    assert small.share_embeddings_and_output_weights and not large.share_embeddings_and_output_weights
    assert (small.scale_factor, large.scale_factor) == (32.0, 8.0)
