# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron: Llama 3.1 trained further (Nano 8B, 70B), and pruned layer by layer (Super 49B, Ultra 253B).

Sources: arXiv:2505.00949, section 2; the config.json of nvidia/Llama-3.1-Nemotron-Nano-8B-v1,
Llama-3.1-Nemotron-70B-Instruct, Llama-3_3-Nemotron-Super-49B-v1 and Llama-3_1-Nemotron-Ultra-253B-v1.
"""

import copy
import json
from dataclasses import dataclass, replace
from typing import Any, Optional

from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock

from nemo2.base.backend.extras import have_te
from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.models.conversion.decoder import BIASES, attention, decoder, gated_feed_forward, unbiased
from nemo2.models.conversion.positions import parameters_of, positions, rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import Config, decoder_fields, read, refusal, said, without, written
from nemo2.models.conversion.table import Conversion, Row
from nemo2.models.gpt import GPTModel
from nemo2.models.llama import SCALING, Llama31Config8B, Llama31Config70B, Llama31Config405B

# Layers in order, as runs "how many x attention feed-forward": A has attention, - has none, then the width of the
# feed-forward block in Hugging Face's ffn_mult (two thirds of which are hidden widths), - where there is none.
_SUPER_49B = """
1xA2.625 5xA5.25 2x-2.625 3xA5.25 1x-3.28125 30xA5.25 1x-1.3125 2x-2.625 1x-1.3125 1x-5.25 1x-1.3125 1x-2.625
3x-1.3125 1xA5.25 1x-1.3125 2x-1.0 1x-1.3125 3x-1.0 2x-1.3125 2x-0.5 2x-1.0 2x-0.5 1x-1.0 2x-0.5 9xA5.25
"""
_ULTRA_253B = """
1xA0.4875 1xA0.975 6xA1.4625 1xA1.95 4x-- 3xA1.95 2xA4.875 6x-- 3xA4.875 5x-- 3xA4.875 1xA2.4375 3x-- 3xA1.95
1x-1.95 1xA4.875 1x-4.875 5x-- 4xA4.875 5x-- 4xA4.875 5x-- 4xA4.875 5x-- 4xA4.875 5x-- 1xA4.875 3xA3.4125 2x--
1xA2.925 3xA2.4375 2x-2.4375 1xA2.4375 1x-- 7x-2.4375 1xA2.4375 5x-- 1xA2.925 1xA4.875 1x-4.875 1xA4.875 8x--
1x-36.5625 8x-- 1x-39.0 8x-- 1x-31.40625 5x-- 1x-27.5625 1x-1.95 1xA1.95 1xA2.4375 1x-- 2xA2.4375 1xA3.4125
4xA4.875 1xA2.4375
"""


def block_configs(runs: str, *, heads_per_group: int) -> str:
    """The JSON that Megatron-Core's heterogeneous layers read, from runs in the notation above."""
    blocks: list[dict[str, Any]] = []
    for run in runs.split():
        count, _, kind = run.partition("x")
        attention, ffn = kind[0] == "A", kind[1:]
        block = {
            "attention": {"n_heads_in_group": heads_per_group if attention else None, "no_op": not attention},
            "ffn": {"ffn_mult": None if ffn == "-" else float(ffn), "no_op": ffn == "-"},
        }
        blocks += [block] * int(count)
    return json.dumps({"block_configs": blocks})


def heterogeneous_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """This pipeline stage's layers, each with its own width, some without attention or feed-forward block."""
    from nemo2.models.layers.spec import _replacements, exchanged

    block = get_gpt_heterogeneous_layer_spec(config, use_te=have_te(), vp_stage=vp_stage)
    if not have_te():
        block = exchanged(block, _replacements(config))
    return ModuleSpec(module=TransformerBlock, submodules=block)


class Llama31NemotronNano8BConfig(Llama31Config8B, kv_channels=128):
    """8.03 B parameters with the 128,256-token vocabulary."""


class Llama31Nemotron70BConfig(Llama31Config70B, kv_channels=128):
    """70.6 B parameters with the 128,256-token vocabulary."""


@configurable
@dataclass
class Llama33NemotronSuper49BConfig(Llama31Config70B, HeterogeneousTransformerConfig):
    """49.9 B parameters with the 128,256-token vocabulary."""

    heterogeneous_layers_config_path: Optional[str] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    heterogeneous_layers_config_encoded_json: str = block_configs(_SUPER_49B, heads_per_group=8)
    transformer_layer_spec: Any = heterogeneous_layer_spec


@configurable
@dataclass
class Llama31NemotronUltra253BConfig(Llama31Config405B, HeterogeneousTransformerConfig):
    """253.4 B parameters with the 128,256-token vocabulary."""

    num_layers: int = 162
    heterogeneous_layers_config_path: Optional[str] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    heterogeneous_layers_config_encoded_json: str = block_configs(_ULTRA_253B, heads_per_group=16)
    transformer_layer_spec: Any = heterogeneous_layer_spec


@configurable
class LlamaNemotronModel(GPTModel):
    """The LightningModule of Llama-Nemotron; see `GPTModel`."""

    default_config = Llama31NemotronNano8BConfig


# Each block has its own width and number of key-value heads.
_FIELDS = without(decoder_fields(), "intermediate_size", "num_key_value_heads")
_ONLY = {"model_type": "nemotron-nas", "hidden_act": "silu"}
_KNOWN = {"attention": ("n_heads_in_group", "no_op"), "ffn": ("ffn_mult", "no_op")}


_WIDTHS = 256
"""A feed-forward's width is rounded up to a multiple of this (modeling_decilm.py, Megatron-Core's heterogeneous_config.py)."""


def _rows(config: Any) -> list[Row]:
    blocks = _blocks(config)
    attending, feeding = (
        [layer for layer, block in enumerate(blocks) if not block[part]["no_op"]] for part in ("attention", "ffn")
    )
    layer = [
        *(replace(row, layers=attending) for row in attention(config)),
        *(replace(row, layers=feeding) for row in gated_feed_forward(bias=config.add_bias_linear)),
    ]
    return decoder(config, layer)


def _config(hf: Config) -> Any:
    rope = rope_of(hf, kinds=("llama3",))
    blocks = hf.get("block_configs")
    if not blocks or len(blocks) != hf["num_hidden_layers"]:
        raise refusal(hf, "block_configs", "it must have one block for each of num_hidden_layers")
    fields = {**read(hf, _FIELDS, only=_ONLY), **BIASES.ours(hf)}
    fields |= positions(hf, rope, longest=fields["seq_length"]) | scaled(hf, rope, SCALING)
    supported = [{part: _block(hf, part, block[part]) for part in _KNOWN} for block in blocks]
    groups = [block["attention"]["n_heads_in_group"] for block in supported if not block["attention"]["no_op"]]
    if not groups:
        raise refusal(hf, "block_configs", "at least one block needs attention")
    return Llama33NemotronSuper49BConfig(
        **fields,
        num_query_groups=fields["num_attention_heads"] // groups[0],
        heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": supported}),
    )


def _hf_config(ours: Any) -> dict[str, Any]:
    if not getattr(ours, "heterogeneous_layers_config_encoded_json", None):
        raise ConfigError(
            "model.config.heterogeneous_layers_config_encoded_json is not set, so the model is a plain Llama: use LlamaConfig "
            "or Llama31Config, which are exported as LlamaForCausalLM."
        )
    blocks = _blocks(ours)
    for layer, block in enumerate(blocks):
        if not block["ffn"]["no_op"] and block["ffn"]["ffn_mult"] is None:
            raise ConfigError(
                f"model.config.heterogeneous_layers_config_encoded_json: block {layer} has a feed-forward whose width isn't a "
                f"multiple of {_WIDTHS}, which config.json can't express. Train such a model with another width."
            )
    hf = {
        **written(ours, _FIELDS, only=_ONLY),
        "intermediate_size": None,
        "num_key_value_heads": None,
        **BIASES.theirs(ours),
        "block_configs": [{part: {**block[part], "replace_with_linear": False} for part in _KNOWN} for block in blocks],
        **rope_fields(ours.rotary_base, kind="llama3", **parameters_of(ours, SCALING)),
    }
    ours = copy.copy(ours)  # another form of the same blocks is no difference
    ours.heterogeneous_layers_config_encoded_json = json.dumps({"block_configs": blocks})
    return said(ours, hf, _config)


def _blocks(ours: Any) -> list[dict[str, Any]]:
    """The blocks as config.json has them. Megatron-Core also takes sizes in place of ratios, and ``mlp`` for ``ffn``."""

    def attention_of(block: Any) -> dict[str, Any]:
        own = block["attention"]
        groups = own.get("num_query_groups")
        heads = ours.num_attention_heads // groups if groups else own.get("n_heads_in_group")
        return {"n_heads_in_group": heads, "no_op": bool(own.get("no_op"))}

    def feed_forward_of(block: Any) -> dict[str, Any]:
        own = block.get("ffn") or block["mlp"]
        width = own.get("ffn_hidden_size")
        multiple = own.get("ffn_mult")
        if width:
            multiple = None if width % _WIDTHS else 3 * width / (2 * ours.hidden_size)
        return {"ffn_mult": multiple, "no_op": bool(own.get("no_op"))}

    blocks = json.loads(ours.heterogeneous_layers_config_encoded_json)["block_configs"]
    return [{"attention": attention_of(block), "ffn": feed_forward_of(block)} for block in blocks]


def _block(hf: Config, part: str, fields: Config) -> dict[str, Any]:
    """The settings of a block's attention or feed-forward that nemo2's layers support."""
    strange = {name: value for name, value in fields.items() if value and name not in _KNOWN[part]}
    if strange:
        raise refusal(hf, "block_configs", f"nemo2's blocks don't support {strange} in {part}")
    return {name: fields.get(name) for name in _KNOWN[part]} | {"no_op": bool(fields.get("no_op"))}


LLAMA_NEMOTRON = Conversion(
    architectures=("DeciLMForCausalLM",),
    model=LlamaNemotronModel,
    configs=(Llama33NemotronSuper49BConfig, Llama31NemotronUltra253BConfig),
    rows=_rows,
    config=_config,
    hf_config=_hf_config,
    unbiased=unbiased,
)
