# SPDX-License-Identifier: Apache-2.0
"""Refusals of the layers: every broken rule at once, each with its way out."""

from types import SimpleNamespace

import pytest

from nemo2.base.errors import ConfigError
from nemo2.models.layers.rules import layer_problems, refuse

FINE = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "cp_comm_type": ["p2p", "a2a", "all_gather", None],
}


def test_what_works_breaks_no_rule():
    assert layer_problems(SimpleNamespace(**FINE)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sequence_parallel": False, "num_moe_experts": None},
            "True with tensor_model_parallel_size=2 requires sequence_",
        ),
        (
            {"sequence_parallel": False, "multi_latent_attention": False},
            "num_moe_experts=4 with tensor_model_parallel_s",
        ),
        ({"cp_comm_type": "a2a+p2p"}, "one of 'all_gather', 'p2p', 'a2a'"),
        (
            {"cp_comm_type": "a2a", "num_attention_heads": 6},
            "num_attention_heads = 6 is not a multiple of .* 2 * 2 = 4",
        ),
        ({"cp_comm_type": "a2a", "multi_latent_attention": False, "num_query_groups": 2}, "num_query_groups = 2"),
        (
            {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
            "requires expert_model_parallel_size > 1",
        ),
        ({"moe_token_dispatcher_type": "flex"}, "Set moe_token_dispatcher_type='alltoall'"),
        ({"moe_latent_size": 64}, "moe_latent_size=64"),
        ({"post_sublayer_layernorm": True}, "does not apply to single experts"),
        ({"mla_down_proj_fusion": True}, "mla_down_proj_fusion=True"),
        ({"cache_mla_latents": True}, "cache_mla_latents=True"),
        ({"qk_clip": True}, "Set qk_clip=False"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant='dsa'"),
    ],
)
def test_one_sentence_for_each_broken_rule(change, words):
    (problem,) = layer_problems(SimpleNamespace(**FINE | change))
    for part in words.split(" .* "):
        assert part in problem


def test_all_of_them_are_told_at_once():
    wrong = SimpleNamespace(**FINE | {"sequence_parallel": False, "moe_token_dispatcher_type": "flex"})
    with pytest.raises(ConfigError, match="latent.*sequence_parallel=True.*\n.*sequence_parallel=True.*\n.*'flex'"):
        refuse(layer_problems(wrong))
    refuse([])
