# SPDX-License-Identifier: Apache-2.0
"""Llama-Nemotron: Llama 3.1 trained further (Nano 8B, 70B), and pruned layer by layer (Super 49B, Ultra 253B).

Sources: arXiv:2505.00949, section 2; the config.json of nvidia/Llama-3.1-Nemotron-Nano-8B-v1,
Llama-3.1-Nemotron-70B-Instruct, Llama-3_3-Nemotron-Super-49B-v1 and Llama-3_1-Nemotron-Ultra-253B-v1.
"""

import json
from dataclasses import dataclass
from typing import Any, Optional

from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock

from nemo2.base.backend.extras import have_te
from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTModel
from nemo2.models.llama import Llama31Config8B, Llama31Config70B, Llama31Config405B

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


class LlamaNemotronModel(GPTModel):
    """The LightningModule of Llama-Nemotron; see `GPTModel`."""

    default_config = Llama31NemotronNano8BConfig
