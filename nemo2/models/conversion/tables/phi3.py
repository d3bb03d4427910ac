# SPDX-License-Identifier: Apache-2.0
"""The conversion of Phi-3 mini, Llama's decoder at 3.8 B parameters with a window, and the two Phi-4 that have its layers."""

from typing import Any

from nemo2.models.conversion.decoder import attention, decoder, decoder_conversion, feed_forward
from nemo2.models.conversion.pieces import fused_qkv, one
from nemo2.models.conversion.positions import partial_positions, positions_of, rope_of
from nemo2.models.conversion.settings import (
    DERIVED,
    Config,
    Field,
    decoder_fields,
    overlaid,
    uniform_window,
)
from nemo2.models.conversion.table import Row
from nemo2.models.phi3 import Phi3Config, Phi3Model

_LENGTH = "original_max_position_embeddings"


def _rows(config: Phi3Config) -> list[Row]:
    fused = fused_qkv("self_attn.qkv_proj.")
    return decoder(config, [*attention(config, fused), *feed_forward(one("mlp.gate_up_proj."), "mlp.down_proj.")])


def _positions(hf: Config, settings: Config) -> dict[str, Any]:
    renamed: dict[str, Any] = {_LENGTH: hf.get(_LENGTH, 4096)}
    for name in ("rope_scaling", "rope_parameters"):  # the first releases have other names for longrope
        if (hf.get(name) or {}).get("type", (hf.get(name) or {}).get("rope_type")) in ("su", "yarn"):
            renamed[name] = {**hf[name], "rope_type": "longrope"}
    named = overlaid(hf, **renamed)
    rope = rope_of(named, kinds=("default", "longrope"))
    return {**partial_positions(named, rope, longest=settings["seq_length"]), "rotary_percent": rope.partial}


def _positions_of(ours: Phi3Config) -> dict[str, Any]:
    """The inverse of `_positions`. If the factor is the ratio of both lengths, the scaling has only the released models' fields,
    because transformers 4 rejects others."""
    fields = positions_of(ours, partial=ours.rotary_percent)
    length = ours.rope_stretching.original_length if ours.rope_stretching else ours.seq_length
    scaling = fields.get("rope_scaling", {"attention_factor": 1.0})
    if "attention_factor" not in scaling and scaling["factor"] == ours.seq_length / length:
        factors = {name: scaling[name] for name in ("short_factor", "long_factor")}
        fields["rope_scaling"] = {"type": scaling["rope_type"], **factors}
    return {_LENGTH: length, **fields}


PHI3 = decoder_conversion(
    "Phi3ForCausalLM",
    Phi3Model,
    Phi3Config,
    rows=_rows,
    fields=[
        *decoder_fields(head_dim=DERIVED, max_position_embeddings=4096, rms_norm_eps=1e-5),
        Field("resid_pdrop", "hidden_dropout", 0.0),
    ],
    only={"model_type": "phi3", "hidden_act": "silu", "embd_pdrop": 0.0},
    translations=[uniform_window()],
    rotary=(_positions, _positions_of),
)
