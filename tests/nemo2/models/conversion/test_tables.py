# SPDX-License-Identifier: Apache-2.0
"""A family's table against what Megatron-Core stores of the model, and its pieces against what they are pieces of."""

import re
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.models.conversion.families import conversion_for, conversion_of
from nemo2.models.conversion.pieces import Place, cat, every_other, fused_qkv, normalised, one, qkv
from nemo2.models.conversion.settings import meaning
from support import small_runs

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama tied, wide heads": ("LlamaConfig", {"share_embeddings_and_output_weights": True, "kv_channels": 16}),
    "llama with biases": ("LlamaConfig", {"add_bias_linear": True}),
    "mixtral": ("MixtralConfig", {"num_moe_experts": 4}),
    "mixtral with layers apart": ("MixtralConfig", {"num_moe_experts": 4, "hetereogenous_dist_checkpoint": True}),
}


def config_of(name: str) -> Any:
    from nemo2 import llm

    kind, settings = MODELS[name]
    return getattr(llm, kind)(**small_runs.MODEL, **settings)


def stored(names: list[str]) -> dict[str, dict[str, tuple]]:
    """Per model: shapes of the whole tensors that Megatron-Core stores, by key."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from nemo2.mcore.parallel.sharded_state import sharded_state

    small_runs.start_megatron()
    found = {}
    for name in names:
        config = config_of(name)
        state = sharded_state(config.configure_model(None, True, True))
        apply_factories(state)
        found[name] = {
            leaf.key: tuple(leaf.global_shape) for leaf in nested_values(state) if isinstance(leaf, ShardedTensor)
        }
    return found


@pytest.fixture(scope="module")
def all_stored(run_on_ranks: Any) -> dict[str, dict[str, tuple]]:
    return run_on_ranks(stored, 1, list(MODELS))[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_table_names_what_megatron_core_stores_with_its_shapes(all_stored: Any, name: str) -> None:
    config = config_of(name)
    entries = list(conversion_of(config).entries(config, vocab_rows=config.vocab_size))
    assert {entry.key: entry.shape for entry in entries} == all_stored[name]


@pytest.mark.parametrize("name", MODELS)
def test_pieces_tile_the_file_s_tensors_and_ours(name: str) -> None:
    """Each row of each of the file's tensors goes to one place, and each row of ours comes from one."""
    config = config_of(name)
    taken: dict[Any, list[int]] = {}
    for entry in conversion_of(config).entries(config, vocab_rows=72, released_rows=64):
        assert sum(piece.rows for piece in entry.pieces) == entry.own_shape[0]
        for piece in entry.pieces:
            if piece.name is not None:
                taken.setdefault((piece.name, piece.at), []).extend(range(piece.start, piece.stop, piece.step))
    for numbers in taken.values():
        assert sorted(numbers) == list(range(len(numbers)))
    assert not any("*" in name for name, _ in taken)


def test_the_stages_in_a_hybrid_s_pattern_change_no_table() -> None:
    from nemo2.models.ssm import NemotronHConfigBase

    sizes = small_runs.MODEL | {"num_layers": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "ffn_hidden_size": 64}
    whole, staged = (
        NemotronHConfigBase(**sizes | {"hybrid_override_pattern": pattern}) for pattern in ("M*-M", "M|*|-|M")
    )
    tables = [list(conversion_of(config).entries(config, vocab_rows=128)) for config in (whole, staged)]
    assert tables[0] == tables[1] and meaning(whole) == meaning(staged)
    conversion = conversion_of(whole)
    assert conversion.hf_config(whole) == conversion.hf_config(staged)


def test_operations_put_rows_where_megatron_core_has_them() -> None:
    place = Place(rows=16, layer=3, expert=1, heads=4, groups=2, head_dim=2)

    def told(operation: Any) -> list[Any]:
        return [(piece.name, *range(piece.start, piece.stop, piece.step)) for piece in operation.pieces(place)]

    grouped = [("q", 0, 1, 2, 3), ("k", 0, 1), ("v", 0, 1), ("q", 4, 5, 6, 7), ("k", 2, 3), ("v", 2, 3)]
    assert told(qkv("q", "k", "v")) == grouped
    first = {"q": 0, "k": 8, "v": 12}
    assert told(fused_qkv("x")) == [("x", *(first[name] + row for row in found)) for name, *found in grouped]
    assert told(every_other("x")) == [("x", *range(0, 16, 2)), ("x", *range(1, 16, 2))]
    assert told(one("x", 5)) == [("x", *range(5, 21))]
    assert told(one("a.*.b.*.c")) == [("a.3.b.1.c", *range(16))]
    stacked = one("a.*.c", stacked=True, transposed=True).pieces(place)[0]
    assert (stacked.name, stacked.at, stacked.transposed) == ("a.3.c", 1, True)
    assert all(piece.normalised for piece in normalised(one("x")).pieces(place))


def test_a_table_that_gives_other_rows_than_the_tensor_has_is_refused() -> None:
    with pytest.raises(ValueError, match="the pieces have 6 rows, and the tensor has 7"):
        cat("a", "b").pieces(Place(rows=7))


def test_an_unknown_architecture_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="architectures=.*'LlamaForCausalML'.*did you mean 'LlamaForCausalLM'"):
        conversion_for({"architectures": ["LlamaForCausalML"]})
    with pytest.raises(ConfigError) as right:  # the name is that of the file's model_type
        conversion_for({"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "hidden_act": "x" * 200})
    assert "did you mean" not in str(right.value) and "x" * 99 not in str(right.value)
    with pytest.raises(ConfigError, match="config.json has no architectures"):
        conversion_for({})
    for wrong in ("LlamaForCausalLM", 3, [3], {"LlamaForCausalLM": 1}):
        with pytest.raises(ConfigError, match=r"architectures=.*: it must be a list of names"):
            conversion_for({"architectures": wrong})
    with pytest.raises(ConfigError, match=r"model.config=int: nemo2 has no conversion"):
        conversion_of(3)


@pytest.mark.parametrize(
    ("released", "nearest", "differs"),
    [
        (
            {
                "head_dim": 16,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "linear_window": 4,
            },
            "Qwen3MoeForCausalLM",
            "it lacks the field linear_window",
        ),
        (
            {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "n_routed_experts": 8, "index_topk": 4},
            "DeepseekV",
            "index_topk",
        ),
        (
            {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "hidden_act": "gelu"},
            "GraniteForCausalLM",
            "it doesn't support hidden_act='gelu'",
        ),
        # A hybrid, though others share more of the names; and one whose fields stand behind a missing one.
        (
            {"mamba_d_head": 64, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_heads": 2, "rms_norm_eps": 1e-5},
            "NemotronHForCausalLM",
            "it needs layers_block_type",
        ),
        (
            {"layers_block_type": ["hybrid", "mamba"], "mamba_d_state": 16, "mamba_expand": 2, "n_mamba_heads": 2},
            "NemotronHForCausalLM",
            "it doesn't support layers_block_type=['hybrid', 'mamba']",
        ),
        (
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
                "intermediate_size": None,
                "moe_intermediate_size": 32,
            },
            "Glm4MoeForCausalLM: it needs intermediate_size",
            "",
        ),
        (
            {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_scale": 2.0},
            "GemmaForCausalLM",
            "it lacks the field query_scale",
        ),
        # As in Falcon: a family that reads a few sizes isn't near.
        (
            {"multi_query": True, "parallel_attn": True, "layer_norm_epsilon": 1e-5, "alibi_bias_max": 8},
            "none has alibi_bias_max, parallel_attn",
            "",
        ),
    ],
)
def test_an_unknown_family_is_refused_with_the_nearest_and_what_differs(
    released: dict[str, Any], nearest: str, differs: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    told = {"architectures": ["NewForCausalLM"], "vocab_size": 128, "num_key_value_heads": 2, **sizes, **released}
    with pytest.raises(ConfigError) as error:
        conversion_for(told)
    sentence = re.split("The nearest family is |No family is near: ", str(error.value))[1]
    assert sentence.startswith(nearest) and differs in sentence


def test_blocks_in_megatron_core_s_form_are_exported_as_ratios_and_other_widths_refused() -> None:
    import json

    from nemo2.models.conversion.tables.llama_nemotron import LLAMA_NEMOTRON, Llama33NemotronSuper49BConfig

    def blocks(width: int) -> list[dict[str, Any]]:
        attention = {"num_query_groups": 2}
        block = {"attention": attention, "mlp": {"ffn_hidden_size": width}}
        empty = {"attention": attention, "mlp": {"no_op": True, "ffn_hidden_size": None}}
        config: Any = Llama33NemotronSuper49BConfig(
            num_layers=2,
            hidden_size=96,
            num_attention_heads=8,
            num_query_groups=2,
            heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": [block, empty]}),
        )
        assert LLAMA_NEMOTRON.rows(config)
        return LLAMA_NEMOTRON.hf_config(config)["block_configs"]

    whole, empty = blocks(256)
    assert (whole["attention"]["n_heads_in_group"], whole["ffn"]["ffn_mult"]) == (4, 4.0)
    assert empty["ffn"]["no_op"] and not empty["attention"]["no_op"]
    with pytest.raises(ConfigError):
        blocks(100)
