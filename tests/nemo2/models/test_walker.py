# SPDX-License-Identifier: Apache-2.0
"""The shape that is read off a config against the model that Megatron-Core builds from it, weight by weight."""

import dataclasses
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm import mamba_hybrid_layer_allocation as allocation

from nemo2.base.errors import ConfigError
from nemo2.models.hybrid_pattern import hybrid_pattern, pattern_problems
from nemo2.models.parts import Attention, Experts, Mixer
from nemo2.models.walker import shape_of
from support import small_runs
from support.families import small_and_unlike

TINY: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 80, "seq_length": 24, "vocab_size": 96,
    "position_embedding_type": "rope", "add_bias_linear": False, "num_query_groups": 2, "gated_linear_unit": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True}
LATENT: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 80, "seq_length": 24, "vocab_size": 96,
    "num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 24, "moe_layer_freq": [0, 1, 1],
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 10,
    "moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_topk": 2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 80, "seq_length": 24,
    "vocab_size": 96, "mamba_num_groups": 2, "mamba_head_dim": 8, "mamba_state_dim": 16,
}  # fmt: skip
BLOCKS = (
    '{"block_configs": ['
    '{"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": 32}},'
    '{"attention": {"no_op": true, "num_query_groups": null}, "mlp": {"ffn_hidden_size": 64}},'
    '{"attention": {"num_query_groups": null, "replace_with_linear": true},'
    ' "mlp": {"ffn_hidden_size": null, "replace_with_linear": true}},'
    '{"attention": {"num_query_groups": 2}, "mlp": {"no_op": true, "ffn_hidden_size": null}}]}'
)
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions, biases, LayerNorm": ("gpt:GPTConfig", TINY | {
        "position_embedding_type": "learned_absolute", "add_bias_linear": True, "gated_linear_unit": False,
    }),
    "biases of queries alone, tied": ("gpt:GPTConfig", TINY | {
        "add_qkv_bias": True, "normalization": "RMSNorm", "share_embeddings_and_output_weights": True,
    }),
    "wide heads, untied": ("gpt:GPTConfig", TINY | {"kv_channels": 16, "share_embeddings_and_output_weights": False}),
    "normed heads, further norms": ("gpt:GPTConfig", TINY | {"qk_layernorm": True, "post_sublayer_layernorm": True}),
    "gated attention": ("gpt:GPTConfig", TINY | {"attention_output_gate": True}),
    "sinks": ("gpt_oss:GPTOSSConfig20B", TINY | EXPERTS | {"add_bias_linear": True, "kv_channels": 12, "window_size": (7, 0)}),
    "experts in every third layer": ("gpt:GPTConfig", TINY | EXPERTS | {"num_layers": 7, "moe_layer_freq": 3}),
    "experts in some layers": ("gpt:GPTConfig", TINY | EXPERTS | {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 0]}),
    "one by one, with biases": ("gpt:GPTConfig", TINY | EXPERTS | {"moe_grouped_gemm": False, "add_bias_linear": True}),
    "shared experts behind a gate": ("gpt:GPTConfig", TINY | EXPERTS | {
        "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True,
    }),
    "latent attention, one further prediction": ("deepseek:DeepSeekV2Config", LATENT | {"mtp_num_layers": 1}),
    "latent keys alone, two further predictions": ("deepseek:DeepSeekV2LiteConfig", LATENT | {
        "q_lora_rank": None, "mtp_num_layers": 2, "qk_layernorm": False,
    }),
    "further prediction of a dense model": ("gpt:GPTConfig", TINY | {"mtp_num_layers": 1}),
    "heterogeneous": ("llama_nemotron:Llama33NemotronSuper49BConfig", TINY | {
        "num_layers": 4, "heterogeneous_layers_config_encoded_json": BLOCKS,
    }),
    "hybrid": ("ssm:SSMConfig", HYBRID | {"num_layers": 6, "hybrid_override_pattern": "M-M*E-", **EXPERTS}),
    "hybrid spread by ratios": ("ssm:SSMConfig", HYBRID | {
        "num_layers": 9, "hybrid_attention_ratio": 0.3, "hybrid_mlp_ratio": 0.3,
    }),
}  # fmt: skip


def with_experts_in_hybrids(config: Any) -> Any:
    """Layers of experts for the pattern's letter E, which the plain PyTorch stack has no layer for."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerLayerSubmodules

    from nemo2.models.layers.mamba import torch_stack_spec
    from nemo2.models.layers.spec import _replacements, exchanged

    layer: Any = exchanged(get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm"), _replacements(config))
    whole, stack = layer.submodules, torch_stack_spec(config)
    layers: Any = stack.submodules
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
    )
    moe = dataclasses.replace(layer, submodules=experts)
    return dataclasses.replace(stack, submodules=dataclasses.replace(layers, moe_layer=moe))


def weights_of(model: Any) -> dict[str, tuple[int, int]]:
    """Matrices of the built model's layers by their module's name, but for those of routed experts."""
    outside = ("embedding.", "output_layer")
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2
        if "experts" not in name.split(".") and not name.startswith(outside)
    }


def built() -> dict[str, dict[str, Any]]:
    small_runs.start_megatron()
    configs = small_and_unlike()
    for name, (path, fields) in ODD.items():
        module, _, cls = path.partition(":")
        configs[name] = getattr(import_module(f"nemo2.models.{module}"), cls)(**fields)
    results = {}
    for name, config in configs.items():
        if "E" in (getattr(config, "hybrid_override_pattern", None) or ""):
            config.mamba_stack_spec = with_experts_in_hybrids
        model = config.configure_model(None)
        shape = shape_of(config)
        results[name] = {
            "parameters": (shape.parameters, sum(parameter.numel() for parameter in model.parameters())),
            "linears": (
                {name: (linear.outputs, linear.inputs) for name, linear in shape.linears() if linear.copies == 1},
                weights_of(model),
            ),
            "experts": (
                sum(part.routed_parameters * count for part, count in shape.parts.items() if isinstance(part, Experts)),
                sum(p.numel() for key, p in model.named_parameters() if "experts" in key.split(".")),
            ),
        }
    return results


@pytest.fixture(scope="module")
def models(run_on_ranks: Any) -> dict[str, dict[str, Any]]:
    return run_on_ranks(built, 1)[0]


@pytest.mark.quick
def test_a_shape_has_the_parameters_the_experts_and_the_linear_layers_that_megatron_core_builds(models: Any) -> None:
    assert len(models) > 40 and any(found["experts"][0] for found in models.values())
    for name, found in models.items():
        for ours, theirs in (found["parameters"], found["experts"], found["linears"]):
            assert ours == theirs, name


def test_routed_parameters_and_those_that_a_token_meets_are_the_published_ones() -> None:
    """37 B of 671 B, and 11.5 B of a further prediction, arXiv:2412.19437; the embedding's look-up meets one row."""
    from nemo2.models.deepseek import DeepSeekV3Config

    shape = shape_of(DeepSeekV3Config(), 129_280)
    assert shape.active_parameters - shape.embedding_parameters == pytest.approx(37e9, rel=0.02)
    per_expert = 3 * 7168 * 2048
    assert shape.routed_parameters == 58 * 256 * per_expert
    assert shape.parameters - shape.active_parameters == 58 * (256 - 8) * per_expert
    further = shape_of(DeepSeekV3Config(mtp_num_layers=1), 129_280)
    assert further.parameters - shape.parameters == pytest.approx(11.5e9, rel=0.02)


def config_of_pattern(pattern: str | None, **fields: Any) -> SimpleNamespace:
    layers = len((pattern or "").partition("/")[0].replace("|", "")) or 4
    return SimpleNamespace(
        **{**TINY, **EXPERTS, **HYBRID, "num_layers": layers, **fields}, hybrid_override_pattern=pattern
    )


def test_cuts_between_pipeline_stages_are_no_layers() -> None:
    whole, cut = (shape_of(config_of_pattern(pattern)) for pattern in ("M-M*ME", "M-M|*M|E"))
    assert whole == cut and len(cut.layers) == 6
    assert [type(layer.parts[0]).__name__ for layer in cut.layers] == [
        "Mixer",
        "MLP",
        "Mixer",
        "Attention",
        "Mixer",
        "Experts",
    ]


def test_a_hybrids_further_predictions_have_the_layers_of_their_pattern() -> None:
    shape = shape_of(config_of_pattern("MM*-/*-/*-", mtp_num_layers=2))
    assert len(shape.layers) == 4 and [len(layer.parts) for layer in shape.further] == [3, 3]
    inner = shape_of(config_of_pattern("*-")).layer_parameters
    assert shape.layer_parameters - shape_of(config_of_pattern("MM*-")).layer_parameters == 2 * (
        inner + 2 * 48**2 + 3 * 96
    )
    # Megatron-Core builds none where the config doesn't ask for any.
    assert shape_of(config_of_pattern("MM*-/*-/*-")).further == ()


def test_a_depth_that_repeats_computes_again_and_weighs_nothing() -> None:
    once, again = (
        shape_of(SimpleNamespace(**TINY, mtp_num_layers=2, mtp_use_repeated_layer=repeats)) for repeats in (False, True)
    )
    assert once.flops_per_token(24) == again.flops_per_token(24)
    assert once.layer_parameters - again.layer_parameters == sum(part.parameters for part in once.further[1].parts)


def test_letters_mean_what_megatron_core_has_for_them() -> None:
    """Its own table of symbols: a new one must be told here."""
    symbols = allocation.Symbols
    known = set(getattr(symbols, "VALID_LAYERS", None) or symbols.VALID)
    sizes: dict[str, Any] = {
        "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 10,
        "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_num_value_heads": 4, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    for letter in known:
        assert shape_of(config_of_pattern(letter, **sizes)).layer_parameters > 48


@pytest.mark.parametrize("pattern", ["M*X", "MMX/M"])
def test_a_letter_that_nobody_knows_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="hybrid_override_pattern=.*X"):
        shape_of(config_of_pattern(pattern))


def test_a_hybrid_by_ratios_has_the_pattern_that_megatron_core_spreads() -> None:
    config = config_of_pattern(None, num_layers=10, hybrid_attention_ratio=0.2, hybrid_mlp_ratio=0.2)
    found = hybrid_pattern(config)
    assert found is not None and not found.further
    assert (found.decoder.count("*"), found.decoder.count("-"), found.decoder.count("M")) == (2, 2, 6)
    assert sum(count for part, count in shape_of(config).parts.items() if isinstance(part, Mixer)) == 6


def test_a_model_without_blocks_of_its_own_is_read_as_uniform() -> None:
    """Megatron-Core can't build it, which a rule says that reads its shape too."""
    from nemo2.models.gpt import GPTConfig

    config = GPTConfig(**TINY)
    uniform = shape_of(config)
    config.heterogeneous_block_specs = True
    assert shape_of(config) == uniform


def test_windows_are_those_of_their_layers() -> None:
    from nemo2.models.gemma3 import Gemma3Config4B

    layers = shape_of(Gemma3Config4B()).layers
    windows = [part.window for layer in layers for part in layer.parts if isinstance(part, Attention)]
    assert windows == ([1024] * 5 + [None]) * 5 + [1024] * 4  # 34 layers, every sixth sees everything


def test_unknown_kinds_of_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="experimental_attention_variant='something'"):
        shape_of(SimpleNamespace(**TINY, experimental_attention_variant="something"))


def built_alone() -> dict[str, tuple[int, int]]:
    """Parts whose layers need a GPU's kernels to run, but not to be built."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from nemo2.models.layers.norm import TorchNorm

    small_runs.start_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    variants: dict[str, Any] = {
        "linear_attention_freq": 2,
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
    }
    config = MLATransformerConfig(
        **variants, linear_num_key_heads=2, linear_key_head_dim=6, linear_num_value_heads=4, linear_value_head_dim=10,
        linear_conv_kernel_dim=3, normalization="RMSNorm", add_bias_linear=False, q_lora_rank=20, kv_lora_rank=12,
        qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=10, dsa_indexer_n_heads=2, dsa_indexer_head_dim=16,
        dsa_indexer_topk=4, gated_linear_unit=True, experimental_attention_variant="gated_delta_net",
        multi_latent_attention=False,
    )  # fmt: skip

    def numel(module: Any) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    class Duplicated(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any):
            super().__init__(inputs, outputs, bias=bias)

    kind: Any = gated_delta_net.GatedDeltaNet
    for function in (kind.__init__, getattr(kind, "_setup_variant_attrs", kind.__init__)):
        function.__globals__.update(HAVE_FLA=True, chunk_gated_delta_rule=print)
    delta_net = kind(
        config,
        gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=TorchNorm, out_proj=RowParallelLinear
        ),
        layer_number=1,
        pg_collection=groups,
    )
    first, second = (layer.parts[0] for layer in shape_of(config).layers)
    found = {"gated DeltaNet": (first.parameters - 48, numel(delta_net))}  # without the norm before it
    assert isinstance(second, Attention)
    config.multi_latent_attention, config.experimental_attention_variant = True, "dsa"
    indexer = dsa.DSAIndexer(
        config,
        dsa.DSAIndexerSubmodules(
            linear_wq_b=Duplicated, linear_wk=Duplicated, k_norm=TorchNorm, linear_weights_proj=Duplicated
        ),
        pg_collection=groups,
    )
    sparse = shape_of(config).layer_parameters
    config.experimental_attention_variant = None
    found["the indexer of sparse attention"] = sparse - shape_of(config).layer_parameters, 2 * numel(indexer)
    return found


def test_layers_for_gpus_only_weigh_what_their_modules_do(run_on_ranks: Any) -> None:
    for name, (ours, theirs) in run_on_ranks(built_alone, 1)[0].items():
        assert ours == theirs, name


def test_what_the_installed_version_would_not_build_of_a_pattern_is_told() -> None:
    assert not list(pattern_problems(config_of_pattern("M-M*")))
    assert not list(pattern_problems(SimpleNamespace(**TINY)))
    (short,) = pattern_problems(config_of_pattern("M-M*", num_layers=5))
    assert "names 4 layers, but model.config.num_layers=5" in short
    (unknown,) = pattern_problems(config_of_pattern("MX"))
    assert "X" in unknown
    cut = list(pattern_problems(config_of_pattern("M-|M*")))
    if hasattr(allocation, "parse_hybrid_pattern"):
        assert not cut
    else:
        assert len(cut) == 1 and "'|', which separates pipeline stages" in cut[0]
        with pytest.raises(ValueError):  # once it builds the model
            allocation.allocate_layers(4, 0.0, 0.0, "M-|*")
