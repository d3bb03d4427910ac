# SPDX-License-Identifier: Apache-2.0
"""The conversion of Seed-OSS."""

from nemo2.models.conversion.decoder import decoder_conversion, rows
from nemo2.models.conversion.settings import Field, decoder_fields
from nemo2.models.seed_oss import SeedOSSConfig, SeedOSSModel

SEED_OSS = decoder_conversion(
    "SeedOssForCausalLM",
    SeedOSSModel,
    SeedOSSConfig,
    rows=rows,
    fields=[
        *decoder_fields(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_dropout=0.1),
        Field("attention_bias", "add_qkv_bias", True),
        Field("residual_dropout", "hidden_dropout", 0.1),
    ],
    only={"model_type": "seed_oss", "hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
)
