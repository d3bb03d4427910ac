# SPDX-License-Identifier: Apache-2.0
"""FLOP counts against formulas published elsewhere, and against torch's own counter on a real model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo2.base.errors import ConfigError
from nemo2.models.flops import model_flops_per_step, model_flops_per_token
from nemo2.models.llama import Llama3Config8B, Llama31Config405B
from nemo2.models.parts import Mixer
from nemo2.models.ssm import NemotronHConfig8B, SSMConfig
from support import small_runs


def test_a_llama_agrees_with_nemos_closed_form() -> None:
    # NeMo 2.0, utils/flops_formulas.py, llama3: per token, attention counted as the whole square.
    config, seq, vocab = Llama3Config8B(), 8192, 128256
    h, layers, f = config.hidden_size, config.num_layers, config.ffn_hidden_size
    k_over_a = config.num_query_groups / config.num_attention_heads
    expected = layers * h * h * (12 + 12 * k_over_a + 18 * f / h + 12 * seq / h + 6 * vocab / (layers * h))
    assert model_flops_per_token(config, seq, vocab_size=vocab, causal=False) == pytest.approx(expected, rel=1e-12)


def test_causal_attention_is_half_of_the_square() -> None:
    config = Llama31Config405B()
    products = 12 * config.num_layers * config.num_attention_heads * config.kv_channels * 4096
    full = model_flops_per_token(config, 4096, causal=False)
    assert full - model_flops_per_token(config, 4096, causal=True) == pytest.approx(products / 2)


def test_a_gpt_step_agrees_with_korthikanti_et_al() -> None:
    # arXiv:2205.05198, equation 9 per iteration: 72 B L s h^2 (1 + s / 6h + V / 12Lh).
    layers, h, seq, vocab, batch = 4, 256, 128, 1024, 16
    config = SimpleNamespace(num_layers=layers, hidden_size=h, num_attention_heads=4)
    expected = 72 * batch * layers * seq * h**2 * (1 + seq / (6 * h) + vocab / (12 * layers * h))
    assert model_flops_per_step(config, seq, batch, vocab_size=vocab, causal=False) == pytest.approx(expected)


def test_only_the_experts_that_a_token_visits_count() -> None:
    shape: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    dense = model_flops_per_token(SimpleNamespace(**shape, gated_linear_unit=True), 32)
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "gated_linear_unit": True}
    sparse = model_flops_per_token(SimpleNamespace(**shape, **experts, moe_layer_freq=[0, 1, 1, 1]), 32)
    assert dense - sparse == 6 * 3 * 3 * 64 * (128 - 2 * 32)
    every_other = model_flops_per_token(SimpleNamespace(**shape, **experts, moe_layer_freq=2), 32)
    assert dense - every_other == 6 * 2 * 3 * 64 * (128 - 2 * 32)
    shared = SimpleNamespace(**shape, **experts, moe_shared_expert_intermediate_size=16)
    assert model_flops_per_token(shared, 32) == dense - 6 * 4 * 3 * 64 * (128 - 2 * 32 - 16)


def test_low_rank_attention_counts_its_factors() -> None:
    config = SimpleNamespace(
        num_layers=1, hidden_size=32, num_attention_heads=2, ffn_hidden_size=1, multi_latent_attention=True,
        q_lora_rank=8, kv_lora_rank=4, qk_head_dim=6, qk_pos_emb_head_dim=2, v_head_dim=5,
    )  # fmt: skip
    query = 32 * 8 + 8 * 2 * (6 + 2)
    key_value = 32 * (4 + 2) + 4 * 2 * (6 + 5)
    scores_and_values = 10 * 2 * ((6 + 2) + 5)
    expected = 6 * (query + key_value + 2 * 5 * 32 + scores_and_values + 2 * 32 * 1)
    assert model_flops_per_token(config, 10, causal=False) == expected


LAYERS: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "seq_length": 16, "vocab_size": 64,
}  # fmt: skip
SMALL_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "LlamaConfig", {}),
    "hybrid": ("ssm", "NemotronHConfig8B", {
        "num_layers": 6, "hybrid_override_pattern": "M-M*M-", "mamba_num_groups": 2, "mamba_head_dim": 8,
        "mamba_state_dim": 16,
    }),
    "mixers with heads of their own": ("ssm", "NemotronNano9Bv2", {
        "num_layers": 2, "hybrid_override_pattern": "MM", "mamba_num_heads": 6, "mamba_num_groups": 2,
        "mamba_head_dim": 8, "mamba_state_dim": 16, "kv_channels": 8,
    }),
    "spread by shares": ("ssm", "SSMConfig", {
        "num_layers": 6, "hybrid_attention_ratio": 0.17, "hybrid_mlp_ratio": 0.5, "mamba_num_groups": 2,
        "mamba_head_dim": 8, "mamba_state_dim": 16,
    }),
    "heterogeneous": ("llama_nemotron", "Llama33NemotronSuper49BConfig", {
        "heterogeneous_layers_config_encoded_json": '{"block_configs": ['
        '{"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 32}},'
        '{"attention": {"no_op": true, "num_query_groups": null}, "mlp": {"ffn_hidden_size": 64}},'
        '{"attention": {"num_query_groups": 2}, "mlp": {"no_op": true, "ffn_hidden_size": null}}]}',
    }),
}  # fmt: skip


def counted_by_torch() -> dict[str, tuple[float, float]]:
    """For each model, the FLOPs of its linear layers by torch's counter, and those of the formula without the rest."""
    from importlib import import_module

    small_runs.start_megatron()
    counts = {}
    for name, (module, config_class, fields) in SMALL_MODELS.items():
        config = getattr(import_module(f"nemo2.models.{module}"), config_class)(**{**LAYERS, **fields})
        chunk = config.configure_model(None)
        tokens = torch.zeros(2, config.seq_length, dtype=torch.long)
        positions = torch.arange(config.seq_length).expand_as(tokens)
        with FlopCounterMode(display=False) as counter:
            chunk(tokens, positions, None, labels=tokens).mean().backward()
        by_torch = sum(
            flops for op, flops in counter.get_flop_counts()["Global"].items() if str(op).endswith(("mm", "addmm"))
            and "bmm" not in str(op)
        )  # fmt: skip
        # A sequence of length 0 leaves attention scores out and keeps the projections; the scan is taken off by hand.
        mixers = sum(type(layer).__name__ == "TorchMambaMixer" for layer in chunk.modules())
        inner = (config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim) * config.mamba_head_dim
        scans = mixers * 6 * 2 * inner * config.mamba_state_dim
        counts[name] = float(by_torch), (model_flops_per_token(config, 0) - scans) * tokens.numel()
    return counts


def test_the_matrix_products_are_those_that_torch_counts(run_on_ranks: Any) -> None:
    for name, (by_torch, by_formula) in run_on_ranks(counted_by_torch, 1)[0].items():
        assert by_formula == by_torch, name


def test_the_recurrence_is_what_torch_counts_when_it_is_written_out() -> None:
    heads, channels, states, length = 6, 8, 16, 5
    x = torch.randn(length, heads, 1, channels, requires_grad=True)
    b, c = (torch.randn(length, heads, states, 1, requires_grad=True) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        state, outputs = torch.zeros(heads, states, channels), []
        for t in range(length):
            state = 0.9 * state + torch.bmm(b[t], x[t])
            outputs.append(torch.bmm(c[t].transpose(1, 2), state))
        torch.stack(outputs).sum().backward()
    mixer = Mixer(name="mixer", hidden=0, heads=heads, head_dim=channels, states=states, groups=2)
    assert counter.get_total_flops() == 6 * mixer.products(length) * length


def test_a_hybrid_counts_its_layers_by_their_letters() -> None:
    whole = NemotronHConfig8B()
    sizes = {kind: whole.hybrid_override_pattern.count(kind) for kind in "M-*"}
    assert sizes == {"M": 24, "-": 24, "*": 4}  # arXiv:2504.03624, table 1
    hidden, seq = 4096, 8192
    mixer = hidden * (2 * 8192 + 2 * 8 * 128 + 128) + 8192 * hidden + 2 * 8192 * 128
    attention = hidden * 128 * (32 + 2 * 8) + hidden * hidden + seq / 2 * 2 * hidden
    expected = 24 * mixer + 24 * 2 * hidden * 21504 + 4 * attention + hidden * 131072
    assert model_flops_per_token(whole, seq) == pytest.approx(6 * expected, rel=1e-12)
    # Two FLOPs per parameter and pass; the look-up of the embedding computes nothing.
    assert model_flops_per_token(whole, 0) == pytest.approx(6 * (8.10e9 - hidden * 131072), rel=0.01)


def test_a_letter_without_a_formula_is_refused() -> None:
    config = SSMConfig(num_layers=2, hidden_size=32, num_attention_heads=4, hybrid_override_pattern="M*")
    config.hybrid_override_pattern = "MX"
    with pytest.raises(ConfigError, match="hybrid_override_pattern='MX'"):
        model_flops_per_token(config, 8)


def test_heterogeneous_layers_count_as_many_flops_as_parameters() -> None:
    from nemo2.models.llama_nemotron import Llama33NemotronSuper49BConfig

    config = Llama33NemotronSuper49BConfig()
    rows = config.hidden_size * 128_256
    assert model_flops_per_token(config, 0, vocab_size=128_256) == pytest.approx(6 * (49.87e9 - rows), rel=0.001)
