# SPDX-License-Identifier: Apache-2.0
"""Baichuan 2 7B: Llama's decoder with a vocabulary of 125,696, and logits from rows of length one.

Sources: arXiv:2309.10305, table 2; config.json of baichuan-inc/Baichuan2-7B-Base. The 13B uses ALiBi and is not here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.models.decoder import DecoderConfig
from nemo2.models.gpt import GPTModel


@configurable
@dataclass
class Baichuan2Config(DecoderConfig):
    """Settings that all Baichuan 2 models share."""

    seq_length: int = 4096
    init_method_std: float = 0.02
    layernorm_epsilon: float = 1e-6
    normalize_output_layer: bool = True
    """Each row of the output layer's weight is divided by its length before it is used (arXiv:2309.10305, section 2.4); its
    gradient goes through that. NeMo 2.0 leaves this out, and is another model for it. False uses the rows as they are."""

    def configure_model(
        self,
        tokenizer: Any,
        pre_process: Optional[bool] = None,
        post_process: Optional[bool] = None,
        vp_stage: Optional[int] = None,
    ) -> MegatronGPTModel:
        model = super().configure_model(tokenizer, pre_process, post_process, vp_stage)
        if self.normalize_output_layer and model.post_process:
            with_rows_of_length_one(model.output_layer)
        return model


@configurable
@dataclass
class Baichuan2Config7B(Baichuan2Config):
    """7.51 B parameters with the 125,696-token vocabulary."""

    num_layers: int = 32
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: Optional[int] = 32
    ffn_hidden_size: Optional[int] = 11008


@configurable
class Baichuan2Model(GPTModel):
    """A Baichuan 2 as Lightning and ``MegatronStrategy`` see it; see `GPTModel`."""


def with_rows_of_length_one(output_layer: nn.Module) -> None:
    """Makes a linear layer use its weight ``[vocabulary / tp, hidden]`` with every row divided by its length."""
    layer: Any = output_layer
    # A gradient that is written into the weight's buffer would pass the division by.
    layer.gradient_accumulation_fusion = False
    # Not a hook: what runs before the layer's other hooks would see a weight that is still being gathered.
    layer.forward = partial(_forward_normalised, layer, layer.forward)


def _forward_normalised(
    layer: Any, forward: Callable[..., Any], hidden: Tensor, weight: Optional[Tensor] = None, **kwargs: Any
) -> Any:
    return forward(hidden, weight=F.normalize(layer.weight if weight is None else weight), **kwargs)
