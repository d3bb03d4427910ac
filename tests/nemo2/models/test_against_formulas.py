# SPDX-License-Identifier: Apache-2.0
"""Decoders of the families, written out in plain PyTorch from their papers, against ours at small widths.

`Formula` states what a family computes; nothing in it is read from our configs. Experts, latent attention and attention
sinks are compared where their layers are, in ``layers/``.
"""

import dataclasses
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support import small_runs
from support.plain_decoder import scaled_by_wavelength
from support.small_runs import device

SEQ, VOCAB, WIDTH, HEADS, DIM = 32, 96, 32, 4, 8


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formula:
    activation: Callable[[Tensor], Tensor] = F.silu
    gated: bool = True
    layer_norm: bool = False
    norm_around_zero: bool = False
    epsilon: float = 1e-5
    norm_behind: bool = False
    groups: int = 2
    rotary_base: Callable[[int], float] | None = lambda layer: 1e4
    """By layer; None where positions are learned."""
    stretched: Callable[[int], float] = lambda layer: 1.0
    scaling: tuple[float, float, float, int] | None = None
    """Llama 3.1's: scale, low and high frequency factors, old context."""
    rotated: float = 1.0
    in_pairs: bool = False
    no_positions: Callable[[int], bool] = lambda layer: False
    normed_heads: bool = False
    unit_heads: bool = False
    scale: float = DIM**-0.5
    score_cap: float | None = None
    logit_cap: float | None = None
    window: Callable[[int], int | None] = lambda layer: None
    chunk: Callable[[int], int | None] = lambda layer: None
    embedding_scale: float = 1.0


# Layers are counted from 0. In an old context of 400 all three cases of Llama 3.1's scaling occur.
FAMILIES: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "llama:Llama3Config8B": ("Llama 3", {}, Formula(rotary_base=lambda layer: 5e5)),
    "llama:Llama31Config8B": ("Llama 3.1", {"old_context_len": 400}, Formula(
        rotary_base=lambda layer: 5e5, scaling=(8.0, 1.0, 4.0, 400),
    )),
    "llama:Llama32Config1B": ("Llama 3.2, tied", {"old_context_len": 400}, Formula(
        rotary_base=lambda layer: 5e5, scaling=(32.0, 1.0, 4.0, 400),
    )),
    "mistral:MistralConfig7B": (
        "Mistral", {"window_size": (7, 0)}, Formula(window=lambda layer: 8)
    ),
    "qwen2:Qwen2Config500M": ("Qwen 2", {}, Formula(rotary_base=lambda layer: 1e6, epsilon=1e-6)),
    "qwen3:Qwen3Config600M": (
        "Qwen 3", {}, Formula(rotary_base=lambda layer: 1e6, epsilon=1e-6, normed_heads=True)
    ),
    "chatglm:ChatGLM3Config6B": ("ChatGLM", {}, Formula(rotated=0.5, in_pairs=True)),
    "gemma:GemmaConfig2B": ("Gemma", {}, Formula(
        activation=tanh_gelu, norm_around_zero=True, epsilon=1e-6, embedding_scale=math.sqrt(WIDTH),
    )),
    "gemma2:Gemma2Config9B": ("Gemma 2", {"window_size": (7, 0)}, Formula(
        activation=tanh_gelu, norm_around_zero=True, epsilon=1e-6, embedding_scale=math.sqrt(WIDTH), norm_behind=True,
        scale=256**-0.5, score_cap=50.0, logit_cap=30.0, window=lambda layer: 8 if layer % 2 == 0 else None,
    )),
    "gemma3:Gemma3Config4B": ("Gemma 3", {"num_layers": 7, "window_size": 8}, Formula(
        activation=tanh_gelu, norm_around_zero=True, epsilon=1e-6, embedding_scale=math.sqrt(WIDTH), norm_behind=True,
        normed_heads=True, window=lambda layer: None if layer % 6 == 5 else 8,
        rotary_base=lambda layer: 1e6 if layer % 6 == 5 else 1e4, stretched=lambda layer: 8.0 if layer % 6 == 5 else 1.0,
    )),
    "nemotron:Nemotron4Config15B": ("Nemotron", {}, Formula(
        activation=lambda x: F.relu(x) ** 2, gated=False, layer_norm=True, norm_around_zero=True, rotated=0.5,
    )),
    "starcoder:StarcoderConfig15B": ("StarCoder", {"num_query_groups": 1}, Formula(
        activation=F.gelu, gated=False, layer_norm=True, groups=1, rotary_base=None,
    )),
    "starcoder2:Starcoder2Config7B": ("StarCoder 2", {}, Formula(
        activation=tanh_gelu, gated=False, layer_norm=True, rotary_base=lambda layer: 1e6,
    )),
    "gpt3:GPTConfig175B": ("GPT-3", {"num_query_groups": None}, Formula(
        activation=tanh_gelu, gated=False, layer_norm=True, norm_around_zero=True, groups=HEADS, rotary_base=None,
    )),
    "llama4:Llama4Experts16Config": (
        "Llama 4, without experts",
        {"num_layers": 4, "num_moe_experts": None, "moe_shared_expert_intermediate_size": None, "moe_ffn_hidden_size": None,
         "moe_shared_expert_overlap": False, "rope_scaling": False, "attention_chunk_size": 8},
        Formula(rotary_base=lambda layer: 5e5, in_pairs=True, no_positions=lambda layer: layer == 3,
                unit_heads=True, chunk=lambda layer: None if layer == 3 else 8),
    ),
}  # fmt: skip


def logits(formula: Formula, weights: dict[str, Tensor], tokens: Tensor, num_layers: int) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"] + (1.0 if formula.norm_around_zero else 0.0)
        if formula.layer_norm:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + formula.epsilon) * weight
        return x + weights.get(f"{name}.bias", torch.zeros(()))

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    table = weights["embedding.word_embeddings.weight"]
    x = table[tokens] * formula.embedding_scale
    if formula.rotary_base is None:
        x = x + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(num_layers):
        here = f"decoder.layers.{layer}"
        y = attention(formula, layer, norm(x, f"{here}.input_layernorm"), here, linear, norm)
        x = x + (norm(y, f"{here}.self_attention.linear_proj.post_layernorm") if formula.norm_behind else y)
        y = linear(norm(x, f"{here}.pre_mlp_layernorm"), f"{here}.mlp.linear_fc1")
        if formula.gated:
            gate, up = y.chunk(2, dim=-1)
            y = formula.activation(gate) * up
        else:
            y = formula.activation(y)
        y = linear(y, f"{here}.mlp.linear_fc2")
        x = x + (norm(y, f"{here}.mlp.linear_fc2.post_layernorm") if formula.norm_behind else y)
    found = norm(x, "decoder.final_layernorm") @ weights.get("output_layer.weight", table).T
    return found if formula.logit_cap is None else formula.logit_cap * torch.tanh(found / formula.logit_cap)


def attention(formula: Formula, layer: int, y: Tensor, here: str, linear: Any, norm: Any) -> Tensor:
    # Megatron keeps, per group: its queries, its key, its value.
    parts = linear(y, f"{here}.self_attention.linear_qkv").unflatten(-1, (formula.groups, -1, DIM))
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    if formula.normed_heads:
        query, key = (norm(x, f"{here}.self_attention.{n}_layernorm") for x, n in ((query, "q"), (key, "k")))
    has_positions = formula.rotary_base is not None and not formula.no_positions(layer)
    if formula.unit_heads and has_positions:
        query, key = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for x in (query, key))
    if has_positions:
        query, key = (rotate(formula, layer, x) for x in (query, key))
    key, value = (x.repeat_interleave(HEADS // formula.groups, dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * formula.scale
    if formula.score_cap is not None:
        scores = formula.score_cap * torch.tanh(scores / formula.score_cap)
    i, j = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None, :]
    seen = j <= i
    window, chunk = formula.window(layer), formula.chunk(layer)
    if window is not None:
        seen &= i - j < window
    if chunk is not None:
        seen &= i // chunk == j // chunk
    attended = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -math.inf).softmax(-1), value)
    return linear(attended.flatten(2), f"{here}.self_attention.linear_proj")


def rotate(formula: Formula, layer: int, x: Tensor) -> Tensor:
    assert formula.rotary_base is not None
    channels = int(DIM * formula.rotated)
    frequencies = formula.rotary_base(layer) ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    if formula.scaling is not None:
        frequencies = torch.tensor(scaled_by_wavelength(frequencies.tolist(), *formula.scaling), dtype=torch.float64)
    angles = torch.outer(torch.arange(SEQ, dtype=torch.float64), frequencies / formula.stretched(layer)).float()
    turned = x[..., :channels]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if formula.in_pairs else turned.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack([one, other], -1).flatten(-2) if formula.in_pairs else torch.cat([one, other], -1)
    return torch.cat([turned, x[..., channels:]], -1)


def ours_and_the_formulas(names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    small_runs.start_megatron()
    found = {}
    for name in names:
        module, _, cls = name.partition(":")
        _, fields, formula = FAMILIES[name]
        sizes = {
            "num_layers": 2, "hidden_size": WIDTH, "ffn_hidden_size": 48, "num_attention_heads": HEADS,
            "num_query_groups": 2, "kv_channels": DIM, "seq_length": SEQ, "vocab_size": VOCAB,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        }  # fmt: skip
        config = getattr(import_module(f"nemo2.models.{module}"), cls)(**(sizes | fields))
        model = config.configure_model(None).to(device())
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(VOCAB, (2, SEQ), generator=generator)
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and norms start at 0 and 1, where much that is wrong would not show.
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
            positions = torch.arange(SEQ).expand_as(tokens)
            weights = {key: value.cpu() for key, value in model.state_dict().items() if value is not None}
            theirs = logits(formula, weights, tokens, config.num_layers)
            found[name] = (model(tokens.to(device()), positions.to(device()), None), theirs)
    return found


@pytest.fixture(scope="module")
def computed(run_on_ranks: Any) -> dict[str, tuple[Tensor, Tensor]]:
    return run_on_ranks(ours_and_the_formulas, 1, list(FAMILIES))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_its_paper_says(computed: Any, name: str) -> None:
    ours, theirs = computed[name]
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
