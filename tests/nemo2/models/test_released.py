# SPDX-License-Identifier: Apache-2.0
"""What the released models compute where Megatron-Core or NeMo 2.0 compute something else, by transformers' own modules."""

import itertools
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from megatron.core.transformer.moe.router import TopKRouter
from transformers import DeepseekV2Config as Published
from transformers import LlamaConfig, Phi3Config

from nemo2.base.errors import ConfigError
from nemo2.models.deepseek import DeepSeekV2Config, DeepSeekV3Config
from nemo2.models.llama4 import Llama4Experts16Config, Llama4Experts128Config
from nemo2.models.rotary import scale_rotary_frequencies
from support import small_runs
from support.ranks import each
from support.small_runs import start_megatron

TINY: dict[str, Any] = small_runs.MODEL | {"num_query_groups": 4, "vocab_size": 96, "seq_length": 32, "kv_channels": 8}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 6,
    "moe_aux_loss_coeff": 0.0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "moe_layer_freq": [0, 1],
}


def chosen(layout: dict[str, Any], replay: bool) -> list[dict[str, Any]]:
    """Of each router the weights that it gives to experts, beside those of transformers' router with the same weight."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    start_megatron(**layout)
    config = DeepSeekV2Config(
        **TINY, **EXPERTS, **layout, mtp_num_layers=1, moe_enable_routing_replay=replay,
        sequence_parallel=layout["tensor_model_parallel_size"] > 1,
    )  # fmt: skip
    published: Any = DeepseekV2TopkRouter(
        Published(
            hidden_size=32, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=6, n_group=4, topk_group=2,
            topk_method="group_limited_greedy", routed_scaling_factor=16.0,
        )
    )  # fmt: skip
    routers = [module for module in config.configure_model(None).modules() if isinstance(module, TopKRouter)]
    found = []
    for router in routers:
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(len(found)))
        published.weight.data.copy_(router.weight)
        hidden = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            probabilities, _ = router(hidden)
            _, weights, experts = published(hidden)
        found.append({"ours": probabilities, "theirs": torch.zeros_like(probabilities).scatter(1, experts, weights)})
    return found


def test_deepseek_v2_picks_the_experts_that_the_release_picks(run_on_ranks: Any) -> None:
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for ranks, sizes in ((2, layout), (1, dict.fromkeys(layout, 1))):
        for routers in itertools.chain(*run_on_ranks(each, ranks, chosen, [(sizes, False), (sizes, True)])):
            assert len(routers) == 2  # of the decoder, and of the further prediction
            for router in routers:
                torch.testing.assert_close(router["ours"], router["theirs"], rtol=1e-5, atol=1e-6)


def replayed() -> dict[str, torch.Tensor]:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    start_megatron()
    chunk = DeepSeekV2Config(**TINY, **EXPERTS, moe_enable_routing_replay=True).configure_model(None)
    (router,) = (module for module in chunk.modules() if isinstance(module, TopKRouter))
    hidden, other = torch.randn(2, 8, 1, 32).unbind(0)
    with torch.no_grad():
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        first = router(hidden)[1]
        RouterReplay.set_replay_data(RouterReplay.get_recorded_data())
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        return {"first": first, "again": router(other)[1]}


def test_a_recorded_choice_of_deepseek_v2_is_replayed(run_on_ranks: Any) -> None:
    found = run_on_ranks(replayed, 1)[0]
    assert torch.equal(found["first"], found["again"])


def test_the_fused_router_is_refused_for_groups_ranked_by_their_best_expert() -> None:
    from nemo2.models.layers.rules import best_of_group_needs_plain_router

    def fused(made: Any, **fields: Any) -> list[str]:
        config = made(**TINY)
        for name, value in {"moe_router_fusion": True, **fields}.items():
            setattr(config, name, value)
        return best_of_group_needs_plain_router(config)

    tiny = {**EXPERTS}
    assert "moe_router_group_score='max'" in fused(DeepSeekV2Config, **tiny)[0]
    assert fused(DeepSeekV2Config, **tiny | {"moe_router_topk": 2}) == []  # the sum of one score is the best one
    assert fused(DeepSeekV3Config, **tiny) == []


def test_scout_stretches_its_frequencies_as_released() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = Llama4Experts16Config(num_layers=4)
    # rope_scaling of meta-llama/Llama-4-Scout-17B-16E's config.json
    released = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    published = LlamaConfig(
        hidden_size=5120,
        num_attention_heads=40,
        head_dim=128,
        max_position_embeddings=10_485_760,
        rope_parameters=released,
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](published, torch.device("cpu"))
    plain = 1.0 / (ours.rotary_base ** (torch.arange(0, 128, 2).float() / 128))
    scaled = scale_rotary_frequencies(
        plain,
        scale_factor=ours.rope_scaling_factor,
        low_freq_factor=ours.low_freq_factor,
        high_freq_factor=ours.high_freq_factor,
        old_context_len=ours.old_context_len,
    )
    assert ours.rope_scaling and not Llama4Experts128Config(num_layers=4, moe_router_dtype="fp32").rope_scaling
    torch.testing.assert_close(scaled, theirs)


def test_phi_4_mini_scales_queries_and_keys_as_released() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from nemo2.models.phi3 import Phi4MiniConfig3P8B

    ours: Any = Phi4MiniConfig3P8B().rope_stretching
    published = Phi3Config(
        hidden_size=3072, num_attention_heads=24, max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
            "short_factor": ours.short_factors, "long_factor": ours.long_factors,
        },
    )  # fmt: skip
    _, amplitude = ROPE_INIT_FUNCTIONS["longrope"](published, torch.device("cpu"), seq_len=4096)
    assert ours.amplitude == pytest.approx(amplitude) and amplitude > 1.1


def test_a_frequency_that_turns_exactly_once_is_a_number() -> None:
    once = torch.tensor([2 * torch.pi / 8192], dtype=torch.float64)
    scaling = {"scale_factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "old_context_len": 8192}
    assert scale_rotary_frequencies(once, **scaling).isfinite().all()


@pytest.mark.parametrize(
    ("ours", "theirs", "window"),
    [("starcoder2.Starcoder2Config7B", "Starcoder2Config", 4096), ("phi3.Phi3ConfigMini", "Phi3Config", 2047)],
)
def test_a_token_sees_as_far_back_as_in_the_release(ours: str, theirs: str, window: int) -> None:
    from transformers.masking_utils import create_sliding_window_causal_mask

    from nemo2.models.layers.attention_rule import AttentionRule

    module, name = ours.split(".")
    config = getattr(import_module(f"nemo2.models.{module}"), name)(num_layers=1)
    length = window + 3
    published = getattr(transformers, theirs)(sliding_window=window)
    published._attn_implementation = "eager"
    mask = create_sliding_window_causal_mask(
        published, inputs_embeds=torch.zeros(1, length, 1), attention_mask=None, past_key_values=None,
    )  # fmt: skip
    seen = AttentionRule(causal=True, scale=1.0, window=config.window_size).allowed(
        0, length, length, torch.device("cpu")
    )
    assert seen is not None and mask is not None
    assert torch.equal(seen, mask[0, 0] == 0)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: list[tuple[int, int]], chunk: int) -> Any:
    """Attention of every token to those before it in its own sequence and chunk, written out; ``[S, B, N, D]``."""
    allowed = torch.zeros(q.size(0), q.size(0), dtype=torch.bool)
    for start_, end in sequences:
        for token in range(start_, end):
            allowed[token, token - (token - start_) % chunk : token + 1] = True
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def chunked_attention(lengths: list[int], rooms: list[int] | None, chunk: int) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from nemo2.models.layers.attention import SDPAttention
    from nemo2.models.llama4 import attend_in_chunks

    start_megatron()
    sizes: dict[str, Any] = TINY | {"num_layers": 4}
    config = Llama4Experts16Config(**sizes, attention_chunk_size=chunk)
    attention: Any = SDPAttention(config, 1, AttnMaskType.causal, "self")
    attend_in_chunks(attention, chunk)
    total, batch = (lengths[0], 2) if rooms is None else (sum(rooms), 1)
    tensors = [torch.randn(total, batch, 4, 8, requires_grad=True) for _ in range(3)]
    sequences, packed = [(0, total)], None
    if rooms is not None:
        real, padded = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, rooms))
        sequences = list(zip(padded[:-1].tolist(), padded[1:].tolist(), strict=True))
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded, max_seqlen_q=max(rooms), max_seqlen_kv=max(rooms),
        )  # fmt: skip
    handed = tensors if packed is None else [tensor.squeeze(1) for tensor in tensors]
    found = attention(*handed, None, packed_seq_params=packed)
    query, key, value = tensors
    expected = dense(query, key, value, sequences, chunk)
    expected = expected if packed is None else expected.squeeze(1)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((x * weights).sum(), tensors) for x in (found, expected)]
    return {"found": found.detach(), "expected": expected.detach(), "gradients": gradients}


def test_chunks_need_not_divide_a_sequence(run_on_ranks: Any) -> None:
    cases = [*(([length], None, 8) for length in (24, 21, 9, 8, 5)), ([19, 3, 8], [20, 3, 9], 8)]
    for found in run_on_ranks(each, 1, chunked_attention, cases)[0]:
        torch.testing.assert_close(found["found"], found["expected"])
        for ours, theirs in zip(*found["gradients"], strict=True):
            torch.testing.assert_close(ours, theirs)


def llama4_at_other_lengths() -> dict[str, torch.Tensor]:
    """Logits of a sequence that is no multiple of the chunk and longer than was configured, and of its beginning."""
    start_megatron()
    sizes: dict[str, Any] = TINY | {"seq_length": 8, "num_layers": 4}
    config = Llama4Experts16Config(
        **sizes, num_moe_experts=2, moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16, attention_chunk_size=8,
    )  # fmt: skip
    chunk = config.configure_model(None)
    tokens = torch.randint(0, 96, (1, 21))
    positions = torch.arange(21)[None]
    with torch.no_grad():
        return {
            "whole": chunk(tokens, positions, None)[:, :13],
            "beginning": chunk(tokens[:, :13], positions[:, :13], None),
        }


def test_llama_4_takes_lengths_that_its_chunk_does_not_divide(run_on_ranks: Any) -> None:
    found = run_on_ranks(llama4_at_other_lengths, 1)[0]
    torch.testing.assert_close(found["whole"], found["beginning"])


def baichuan(layout: dict[str, Any]) -> dict[str, Any]:
    """Logits and the gradient of the output layer, beside those of the release's formula."""
    from nemo2.models.baichuan import Baichuan2Config

    start_megatron(**layout)
    chunk: Any = Baichuan2Config(**TINY, **layout).configure_model(None)
    handed: list[torch.Tensor] = []
    chunk.output_layer.register_forward_pre_hook(lambda layer, inputs: handed.append(inputs[0]))
    tokens = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    chunk.output_layer.weight.data.mul_(3.0)
    chunk(tokens, torch.arange(8).expand_as(tokens), None, labels=labels).sum().backward()
    return {
        "hidden": handed[0].detach(),
        "weight": chunk.output_layer.weight.detach(),
        "gradient": chunk.output_layer.weight.grad,
        "labels": labels,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_baichuan_normalises_the_rows_of_its_output_layer(run_on_ranks: Any, ranks: int) -> None:
    parts = run_on_ranks(baichuan, ranks, {"tensor_model_parallel_size": ranks})
    weight = torch.cat([part["weight"] for part in parts]).requires_grad_()
    logits = parts[0]["hidden"] @ F.normalize(weight).T
    F.cross_entropy(logits.flatten(0, 1), parts[0]["labels"].T.flatten(), reduction="sum").backward()
    assert weight.grad is not None
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts]), weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gpt", "GPTConfig"), ("llama", "LlamaConfig"), ("llama", "Llama31Config"), ("qwen3", "Qwen3MoEConfig"),
        ("gemma2", "Gemma2Config"), ("starcoder2", "Starcoder2Config"),
    ],
)  # fmt: skip
def test_a_configuration_without_a_size_says_what_it_lacks(module: str, name: str) -> None:
    made = getattr(import_module(f"nemo2.models.{module}"), name)
    with pytest.raises(ConfigError, match=f"{name} has no default sizes: set .*hidden_size.*Llama32Config1B"):
        made()
