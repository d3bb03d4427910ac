# SPDX-License-Identifier: Apache-2.0
"""Nemotron 3 and 4: squared ReLU without a gate, LayerNorm, half of each head's channels rotated.

Sources: arXiv:2402.16819, table 1 (15B); arXiv:2406.11704, table 1 (340B); arXiv:2407.14679, table 3 (4B, 8B);
NeMo 2.0 for 22B and for initialisation.
"""

from megatron.core.activations import squared_relu

from nemo2.models.gpt import GPTConfig, GPTModel


class NemotronConfig(
    GPTConfig,
    layernorm_zero_centered_gamma=True,
    activation_func=squared_relu,
    position_embedding_type="rope",
    rotary_percent=0.5,
    share_embeddings_and_output_weights=False,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    persist_layer_norm=True,
    apply_rope_fusion=True,
    num_layers=32,
    seq_length=4096,
    hidden_size=3072,
    ffn_hidden_size=9216,
    num_attention_heads=24,
    num_query_groups=8,
    kv_channels=128,
    init_method_std=0.0134,
):
    """Settings that all Nemotron models share; the default sizes are those of 4B."""


class Nemotron3Config4B(NemotronConfig):
    """4.19 B parameters with the 256,000-token vocabulary (Minitron 4B)."""


class Nemotron3Config8B(
    NemotronConfig,
    hidden_size=4096,
    ffn_hidden_size=16384,
    num_attention_heads=32,
    num_query_groups=None,
    kv_channels=None,
    init_method_std=0.01,
):
    """8.54 B parameters with the 256,000-token vocabulary."""


class Nemotron3Config22B(
    NemotronConfig,
    num_layers=40,
    hidden_size=6144,
    ffn_hidden_size=24576,
    num_attention_heads=48,
    num_query_groups=None,
    kv_channels=None,
    init_method_std=0.008,
):
    """21.3 B parameters with the 256,000-token vocabulary."""


class Nemotron4Config15B(
    NemotronConfig, hidden_size=6144, ffn_hidden_size=24576, num_attention_heads=48, kv_channels=None
):
    """15.6 B parameters with the 256,000-token vocabulary."""


class Nemotron4Config340B(
    NemotronConfig,
    num_layers=96,
    hidden_size=18432,
    ffn_hidden_size=73728,
    num_attention_heads=96,
    kv_channels=None,
    init_method_std=0.0063,
):
    """341 B parameters with the 256,000-token vocabulary."""


class NemotronModel(GPTModel):
    """The LightningModule of Nemotron; see `GPTModel`."""

    default_config = NemotronConfig
