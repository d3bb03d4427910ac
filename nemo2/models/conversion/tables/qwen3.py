# SPDX-License-Identifier: Apache-2.0
"""The conversion of Qwen 3, dense and with experts."""

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.experts import EXPERT_LAYERS, expert_weights, rows_with_experts
from nemo2.models.conversion.settings import Config, Field, Translation, decoder_fields, expert_fields, overlaid
from nemo2.models.conversion.tables.qwen2 import WINDOWS
from nemo2.models.qwen3 import Qwen3Config, Qwen3Model, Qwen3MoEConfig

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
