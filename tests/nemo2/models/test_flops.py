# SPDX-License-Identifier: Apache-2.0
"""FLOP counts against formulas published elsewhere, and against torch's own counter on a real model."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo2.models.flops import model_flops_per_step, model_flops_per_token
from nemo2.models.llama import Llama3Config8B, Llama31Config405B


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


def counted_by_torch(shape: dict[str, Any]) -> tuple[float, float]:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from torch.utils.flop_counter import FlopCounterMode

    from nemo2.backend import get_backend
    from nemo2.models.llama import LlamaConfig

    get_backend().install()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = LlamaConfig(**shape)
    chunk = config.configure_model(None)
    tokens = torch.zeros(2, config.seq_length, dtype=torch.long)
    positions = torch.arange(config.seq_length).expand_as(tokens)
    with FlopCounterMode(display=False) as counter:
        chunk(tokens, positions, None, labels=tokens).mean().backward()
    attention = sum(
        flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" in str(op) or "bmm" in str(op)
    )
    # A sequence of length 0 leaves attention scores out and keeps the projections.
    return float(counter.get_total_flops() - attention), model_flops_per_token(config, 0) * tokens.numel()


def test_the_matrix_products_are_those_that_torch_counts(run_on_ranks: Any) -> None:
    shape = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
        "seq_length": 16, "vocab_size": 64,
    }  # fmt: skip
    by_torch, by_formula = run_on_ranks(counted_by_torch, 1, shape)[0]
    assert by_formula == by_torch
