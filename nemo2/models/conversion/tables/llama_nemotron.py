# SPDX-License-Identifier: Apache-2.0
"""The conversion of Llama-Nemotron."""

import copy
import json
from dataclasses import replace
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.models.conversion.decoder import BIASES, attention, decoder, gated_feed_forward, unbiased
from nemo2.models.conversion.positions import parameters_of, positions, rope_fields, rope_of, scaled
from nemo2.models.conversion.settings import Config, decoder_fields, read, refusal, said, without, written
from nemo2.models.conversion.table import Conversion, Row
from nemo2.models.conversion.tables.llama import SCALING
from nemo2.models.llama_nemotron import (
    Llama31NemotronUltra253BConfig,
    Llama33NemotronSuper49BConfig,
    LlamaNemotronModel,
)

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
