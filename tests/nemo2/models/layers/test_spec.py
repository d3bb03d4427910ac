# SPDX-License-Identifier: Apache-2.0
"""The layers a GPT is built from: which classes, and that together they compute a Llama."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.errors import ConfigError
from nemo2.models.layers import spec


def config(**fields) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **fields)


def classes(node: Any) -> set[str]:
    """Names of all classes in a spec."""
    if isinstance(node, type):
        return {node.__name__}
    if isinstance(node, (list, tuple)):
        return set().union(*map(classes, node)) if node else set()
    if hasattr(node, "keywords"):
        return classes([node.func, *node.args, *node.keywords.values()])
    if dataclasses.is_dataclass(node):
        return classes([getattr(node, field.name) for field in dataclasses.fields(node)])
    return set()


def specs() -> dict[str, set[str]]:
    from megatron.core import parallel_state

    from nemo2.base.backend import get_backend

    get_backend().install()
    parallel_state.initialize_model_parallel()
    return {
        "RMSNorm": classes(spec.layer_spec(config(normalization="RMSNorm", qk_layernorm=True))),
        "LayerNorm": classes(spec.local_layer_spec(config(normalization="LayerNorm"))),
        "layers": {str(len(spec.local_layer_spec(config()).submodules.layer_specs))},
    }


def test_plain_layers_stand_wherever_megatron_has_none_that_parallelise(run_on_ranks):
    answer = run_on_ranks(specs, 1)[0]
    for norm in ("RMSNorm", "LayerNorm"):
        assert {"TorchNorm", "SDPAttention", "ColumnParallelLinear", "RowParallelLinear"} <= answer[norm]
        assert not {"WrappedTorchNorm", "DotProductAttention", "FusedLayerNorm"} & answer[norm]
        assert not [name for name in answer[norm] if name.startswith("TE")]
    assert answer["layers"] == {"2"}


def test_transformer_engine_is_used_where_it_can_run(monkeypatch):
    asked = {}

    def remember(config, use_transformer_engine, **rest):
        asked.update(rest, te=use_transformer_engine)

    monkeypatch.setattr(spec, "have_te", lambda: True)
    monkeypatch.setattr(spec, "get_gpt_decoder_block_spec", remember)
    spec.layer_spec(config(normalization="RMSNorm"), vp_stage=1)
    assert asked == {"te": True, "normalization": "RMSNorm", "qk_l2_norm": False, "vp_stage": 1}


def test_what_has_no_plain_counterpart_is_refused():
    other = config(num_moe_experts=4, moe_ffn_hidden_size=8)
    other.moe_token_dispatcher_type = "flex"
    other.multi_latent_attention, other.tensor_model_parallel_size = True, 2
    other.expert_tensor_parallel_size = 2
    with pytest.raises(ConfigError, match="requires sequence_parallel=True.*\n.*\n.*\n.*flex"):
        spec.local_layer_spec(other)


def test_a_virtual_pipeline_must_say_which_chunk():
    chunked = config(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1, pipeline_dtype=torch.float32
    )
    with pytest.raises(ConfigError, match="pass vp_stage"):
        spec.layer_spec(chunked)


# ------------------------------------------------------------------------------------- a Llama in plain PyTorch


def llama(weights: dict[str, torch.Tensor], tokens: torch.Tensor, *, heads: int, groups: int) -> torch.Tensor:
    """Logits `[B, S, V]`: RMSNorm, rotary positions on halves (base 10000), grouped queries, SwiGLU; in double."""
    weights = {name: value.double() for name, value in weights.items() if value is not None}
    x = weights["embedding.word_embeddings.weight"][tokens]
    depth = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers."))
    for index in range(depth):
        layer = {
            name.removeprefix(f"decoder.layers.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"decoder.layers.{index}.")
        }
        x = x + self_attention(layer, rms_norm(x, layer["input_layernorm.weight"]), heads=heads, groups=groups)
        gate, up = (rms_norm(x, layer["pre_mlp_layernorm.weight"]) @ layer["mlp.linear_fc1.weight"].T).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.linear_fc2.weight"].T
    return rms_norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def self_attention(layer: dict[str, torch.Tensor], x: torch.Tensor, *, heads: int, groups: int) -> torch.Tensor:
    batch, length, hidden = x.shape
    width = hidden // heads
    # Megatron keeps the query heads of a group next to the group's key and value.
    qkv = (x @ layer["self_attention.linear_qkv.weight"].T).view(batch, length, groups, heads // groups + 2, width)
    q = rotate(qkv[:, :, :, :-2].flatten(2, 3))
    k = rotate(qkv[:, :, :, -2]).repeat_interleave(heads // groups, dim=2)
    v = qkv[:, :, :, -1].repeat_interleave(heads // groups, dim=2)
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / width**0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v)
    return out.flatten(2) @ layer["self_attention.linear_proj.weight"].T


def rotate(x: torch.Tensor) -> torch.Tensor:
    length, width = x.size(1), x.size(3)
    angles = torch.outer(torch.arange(length).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def compare_with_plain_llama() -> dict[str, float]:
    """Relative errors of the loss and of every gradient."""
    from bench.bare_megatron import Settings, build_gpt, random_batches, start_parallel

    settings = Settings(hidden=32, heads=4, groups=2, ffn=48, vocab=40, seq=12, gbs=3)
    start_parallel(settings)
    model = build_gpt(settings, True, True, None)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # norms start at one, which would hide a mistake
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    batch = random_batches(settings)(0)
    loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()
    loss.backward()

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = llama(weights, batch["tokens"], heads=4, groups=2)
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    expected.backward()

    errors = {"loss": float((loss - expected).abs() / expected.abs())}
    for name, parameter in model.named_parameters():
        reference = weights[name].grad
        assert parameter.grad is not None and reference is not None
        errors[name] = float((parameter.grad - reference).norm() / reference.norm())
    return errors


def test_a_gpt_of_these_layers_is_a_llama(run_on_ranks):
    errors = run_on_ranks(compare_with_plain_llama, 1)[0]
    assert errors.pop("loss") < 1e-6
    assert len(errors) == 3 + 2 * 6
    assert max(errors.values()) < 1e-5, errors
