# SPDX-License-Identifier: Apache-2.0
"""OLMo 3: OLMo 2 with a window in three of four layers. The fourth attends to everything, with positions stretched by YaRN.

Sources: arXiv:2512.13961; config.json of allenai/Olmo-3-1025-7B and Olmo-3-1125-32B.
"""

from dataclasses import field
from typing import Any

from nemo2.models.gpt import GPTModel
from nemo2.models.layers.local_rotary import LocalAndGlobalRotary, is_local, local_rotary_layer_spec
from nemo2.models.layers.queries import scale_queries
from nemo2.models.olmo2 import OLMo2Config
from nemo2.models.rotary import Yarn, rotary_embedding


class OLMo3Config(
    OLMo2Config,
    seq_length=65536,
    vocab_size=100278,
    window_size=(4095, 0),
    window_attn_skip_freq=4,
    # Transformer Engine splits a sequence with a window over context-parallel ranks only by all-to-all.
    cp_comm_type="a2a",
    # In layers without a window only.
    rope_stretching=field(
        default_factory=lambda: Yarn(original_length=8192, factor=8.0, attention_factor=1.2079441541679836)
    ),
    transformer_layer_spec=local_rotary_layer_spec,
):
    """Settings that both sizes of OLMo 3 share."""

    @property
    def yarn_mscale(self) -> float:
        """0: Megatron-Core's attention would scale queries and keys in all layers."""
        return 0.0

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        local = rotary_embedding(self, rotary_base=self.rotary_base)
        model.rotary_pos_emb = LocalAndGlobalRotary(local_layers=local, global_layers=model.rotary_pos_emb)
        amplitude = 1.0 if self.rope_stretching is None else self.rope_stretching.amplitude
        for layer in model.decoder.layers:
            if not is_local(self, layer.layer_number):
                scale_queries(layer.self_attention.core_attention, amplitude**2)


class OLMo3Config7B(OLMo3Config, num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008):
    """7.30 B parameters."""


class OLMo3Config32B(
    OLMo3Config, num_layers=64, hidden_size=5120, num_attention_heads=40, num_query_groups=8, ffn_hidden_size=27648
):
    """32.2 B parameters; eight key-value heads."""


class OLMo3Model(GPTModel):
    """The LightningModule of OLMo 3; see `GPTModel`."""
