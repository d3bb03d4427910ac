# SPDX-License-Identifier: Apache-2.0
"""A module that isn't Megatron-Core's as a pipeline's only chunk."""

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class PlainChunk(MegatronModule):
    """Any torch module as the one chunk of a pipeline, with what Megatron-Core asks of a model."""

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config=config)
        self.module = module
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, input_tensor: Any) -> None:
        """A plain module isn't split into stages: there is no tensor from a previous one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
