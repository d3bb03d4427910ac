# SPDX-License-Identifier: Apache-2.0
"""Rotary positions that differ between layers with a window (local) and layers that attend to everything (global)."""

from typing import Any, Optional

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from nemo2.models.layers.spec import changed_layer_spec


def local_rotary_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers, with an attention that selects the positions of its kind of layer."""

    def select_positions(parts: Any, number: int) -> None:
        parts.self_attention.module = SelfAttentionOfItsKind

    return changed_layer_spec(config, select_positions, vp_stage=vp_stage)


def is_local(config: Any, layer_number: int) -> bool:
    """Whether the layer, counted from 1, has the window."""
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)


class LocalAndGlobalRotary(nn.Module):
    """The rotary angles of local and of global layers, ``[2, sequence, 1, 1, channels]``.

    They are one tensor rather than a pair, because recomputation saves tensors only.
    """

    def __init__(self, *, local_layers: RotaryEmbedding, global_layers: RotaryEmbedding) -> None:
        super().__init__()
        self.local_layers, self.global_layers = local_layers, global_layers

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([self.local_layers(*args, **kwargs), self.global_layers(*args, **kwargs)])

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.global_layers.get_rotary_seq_len(*args, **kwargs)


class SelfAttentionOfItsKind(SelfAttention):
    """Self-attention that selects the rotary embedding for its kind of layer."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        both = kwargs.get("rotary_pos_emb")
        if both is not None:
            kwargs["rotary_pos_emb"] = both[0 if is_local(self.config, self.layer_number) else 1]
        return super().forward(hidden_states, attention_mask, *args, **kwargs)
