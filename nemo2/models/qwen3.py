# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense and with experts: Qwen 2's decoder with normalised queries and keys in place of the biases.

Sources: arXiv:2505.09388, tables 1 and 2; the released config.json files of Qwen/Qwen3-*.
"""

from dataclasses import dataclass
from typing import Optional, Union

from nemo2.config.capture import configurable
from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.experts import EXPERT_LAYERS, expert_weights, rows_with_experts
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, expert_fields, overlaid
from nemo2.models.decoder import GroupedExperts
from nemo2.models.gpt import GPTModel
from nemo2.models.qwen2 import WINDOWS, Qwen2Config


@configurable
@dataclass
class Qwen3Config(Qwen2Config):
    """Settings that all sizes of Qwen 3 share: heads of 128 channels for every width, an RMSNorm on each query and
    key."""

    add_qkv_bias: bool = False
    qk_layernorm: bool = True
    kv_channels: Optional[int] = 128
    num_query_groups: Optional[int] = 8
    max_position_embeddings: int = 40960
    """The longest sequence in the config.json of exported weights. Training does not read it."""


@configurable
@dataclass
class Qwen3MoEConfig(GroupedExperts, Qwen3Config):
    """Settings that the sizes with experts share: 128 experts in every layer, eight per token."""

    num_moe_experts: Optional[int] = 128
    moe_aux_loss_coeff: Union[float, list[float]] = 1e-3
    moe_router_topk: int = 8


class Qwen3Config600M(
    Qwen3Config,
    num_layers=28,
    hidden_size=1024,
    num_attention_heads=16,
    ffn_hidden_size=3072,
    share_embeddings_and_output_weights=True,
):
    """0.60 B parameters, the embedding counted once (tied)."""


class Qwen3Config1P7B(Qwen3Config600M, hidden_size=2048, ffn_hidden_size=6144):
    """1.72 B parameters, the embedding counted once (tied)."""


class Qwen3Config4B(Qwen3Config600M, num_layers=36, hidden_size=2560, num_attention_heads=32, ffn_hidden_size=9728):
    """4.02 B parameters, the embedding counted once (tied)."""


class Qwen3Config8B(Qwen3Config, num_layers=36, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=12288):
    """8.19 B parameters."""


class Qwen3Config14B(Qwen3Config, num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=17408):
    """14.8 B parameters."""


class Qwen3Config32B(Qwen3Config, num_layers=64, hidden_size=5120, num_attention_heads=64, ffn_hidden_size=25600):
    """32.8 B parameters."""


class Qwen3Config30B_A3B(
    Qwen3MoEConfig,
    num_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=4,
    ffn_hidden_size=6144,
    moe_ffn_hidden_size=768,
):
    """30.5 B parameters, 3.3 B of them used per token."""


class Qwen3Config235B_A22B(
    Qwen3MoEConfig,
    num_layers=94,
    hidden_size=4096,
    num_attention_heads=64,
    num_query_groups=4,
    ffn_hidden_size=12288,
    moe_ffn_hidden_size=1536,
):
    """235.1 B parameters, 22 B of them used per token."""


@configurable
class Qwen3Model(GPTModel):
    """The LightningModule of Qwen 3; see `GPTModel`."""


_LONGEST = Field("max_position_embeddings", "max_position_embeddings", 32768)
_ONLY = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}


QWEN3 = decoder_conversion(
    "Qwen3ForCausalLM",
    Qwen3Model,
    Qwen3Config,
    rows=rows,
    fields=[*decoder_fields(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768), _LONGEST],
    only=_ONLY,
    translations=[WINDOWS],
)


def _named_as_before(hf: Config) -> Config:
    """transformers 5 writes the number of experts under Mixtral's name."""
    renamed = "num_local_experts" in hf and "num_experts" not in hf
    return overlaid(hf, num_experts=hf["num_local_experts"]) if renamed else hf


# Whatever else config.json says, transformers' class has the window in all layers or in none.
_WINDOW = Translation(lambda hf: WINDOWS.ours(overlaid(hf, max_window_layers=0, layer_types=None)), WINDOWS.theirs)
QWEN3_MOE = decoder_conversion(
    "Qwen3MoeForCausalLM",
    Qwen3Model,
    Qwen3MoEConfig,
    rows=rows_with_experts,
    fields=[
        *decoder_fields(num_key_value_heads=4, max_position_embeddings=32768),
        _LONGEST,
        *expert_fields(moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, router_aux_loss_coef=0.001),
    ],
    only=_ONLY | {"model_type": "qwen3_moe"},
    translations=[_WINDOW, expert_weights(), EXPERT_LAYERS],
    flat=_named_as_before,
)
