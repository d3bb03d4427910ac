# SPDX-License-Identifier: Apache-2.0
"""Baichuan 2 7B: Llama's decoder with a vocabulary of 125,696 and an output layer whose rows are normalized.

Sources: arXiv:2309.10305, table 2; config.json of baichuan-inc/Baichuan2-7B-Base. The 13B uses ALiBi and is not
included.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch.nn.functional as F
from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class Baichuan2Config(DecoderConfig):
    """Settings that all Baichuan 2 models share."""

    seq_length: int = 4096
    layernorm_epsilon: float = 1e-6
    normalize_output_layer: bool = True
    """Divide each row of the output layer's weight by its length before use (arXiv:2309.10305, section 2.4). The
    gradient includes the division. NeMo 2.0 leaves it out and is therefore a different model. False: use the rows
    unchanged."""

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        if self.normalize_output_layer and model.post_process:
            with_rows_of_length_one(model.output_layer)


class Baichuan2Config7B(
    Baichuan2Config, num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=32, ffn_hidden_size=11008
):
    """7.51 B parameters with the 125,696-token vocabulary."""


class Baichuan2Model(GPTModel):
    """The LightningModule of Baichuan 2; see `GPTModel`."""


def with_rows_of_length_one(output_layer: nn.Module) -> None:
    """Make a linear layer divide every row of its weight ``[vocabulary / tp, hidden]`` by the row's length."""
    layer: Any = output_layer
    # A gradient that is written into the weight's buffer would bypass the division.
    layer.gradient_accumulation_fusion = False
    # Not a hook: code that runs before the layer's other hooks would see a weight whose gather is incomplete.
    layer.forward = partial(_forward_normalised, layer, layer.forward)


def _forward_normalised(
    layer: Any, forward: Callable[..., Any], hidden: Tensor, weight: Optional[Tensor] = None, **kwargs: Any
) -> Any:
    return forward(hidden, weight=F.normalize(layer.weight if weight is None else weight), **kwargs)
