# SPDX-License-Identifier: Apache-2.0
"""The layers a GPT is built from: which classes. What whole models of them compute is in test_references.py."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.errors import ConfigError
from nemo2.models.layers import spec
from support import small_runs


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
    small_runs.start_megatron()
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
    with pytest.raises(ConfigError, match="requires sequence_parallel=True.*\n.*\n.*flex"):
        spec.local_layer_spec(other)


def test_a_virtual_pipeline_must_say_which_chunk():
    chunked = config(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1, pipeline_dtype=torch.float32
    )
    with pytest.raises(ConfigError, match="pass vp_stage"):
        spec.layer_spec(chunked)
