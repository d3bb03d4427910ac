# SPDX-License-Identifier: Apache-2.0
"""Wraps a module that isn't Megatron-Core's as the only chunk of a pipeline."""

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class PlainChunk(MegatronModule):
    """Any torch module as the only chunk of a pipeline, with the interface that Megatron-Core needs."""

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config=config)
        self.module = module
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Does nothing: a plain module has no previous stage, and so no input from one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
