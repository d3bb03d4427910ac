# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: norms behind attention and feed-forward instead of in front, and norms of queries and keys over all heads.

Sources: arXiv:2501.00656, table 1 and section 3; config.json of allenai/OLMo-2-1124-7B, 1124-13B (also in litgpt's
``config.py``) and 0325-32B.
"""

from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


class OLMo2Config(
    DecoderConfig,
    seq_length=4096,
    layernorm_epsilon=1e-6,
    rotary_base=500_000,
    vocab_size=100352,
    pre_sublayer_layernorm=False,
    post_sublayer_layernorm=True,
    qk_layernorm=True,
    qk_layernorm_over_heads=True,
):
    """Settings that all sizes of OLMo 2 share."""


class OLMo2Config7B(OLMo2Config, num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008):
    """7.30 B parameters."""


class OLMo2Config13B(OLMo2Config, num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=13824):
    """13.7 B parameters."""


class OLMo2Config32B(
    OLMo2Config, num_layers=64, hidden_size=5120, num_attention_heads=40, num_query_groups=8, ffn_hidden_size=27648
):
    """32.2 B parameters; eight key-value heads."""


class OLMo2Model(GPTModel):
    """The LightningModule of OLMo 2; see `GPTModel`."""
