# SPDX-License-Identifier: Apache-2.0
"""The settings that most open decoders since Llama share, so that a family states only its differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional

import torch.nn.functional as F

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.models.gpt import GPTConfig
from nemo2.models.rotary import StretchedRotaryEmbedding, Stretching, rotary_embedding


@dataclass
class GroupedExperts:
    """How families with experts compute them, as the first base class of their configuration."""

    moe_grouped_gemm: bool = True
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_permute_fusion: bool = True


@configurable
@dataclass
class DecoderConfig(GPTConfig):
    """RMSNorm before each block, SwiGLU, rotary positions; no biases, no dropout, an untied output layer.

    Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2.
    """

    normalization: str = "RMSNorm"
    activation_func: Callable = F.silu
    gated_linear_unit: bool = True
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "rope"
    rope_stretching: Optional[Stretching] = None
    """`DynamicNTK`, `RaisedBase`, `LongRope` or `Yarn` of `nemo2.models.rotary`. None: rotary positions are not stretched."""
    add_bias_linear: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    share_embeddings_and_output_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_stretching is None:
            return
        self.rope_stretching.check(int((self.kv_channels or 0) * self.rotary_percent))
        # The settings that contradict stretched positions, each with its fix, as ends of a sentence.
        conflicts = []
        for name in ("seq_len_interpolation_factor", "scale_factor", "rope_scaling_factor"):
            if (value := getattr(self, name, None)) is not None:
                conflicts.append(
                    f"and {name}={value} both change rotary frequencies: keep only one, in a model class that has only one"
                )
        if self.position_embedding_type != "rope":
            conflicts.append(
                f'needs rotary positions, but position_embedding_type="{self.position_embedding_type}": set '
                'position_embedding_type="rope"'
            )
        if self.apply_rope_fusion and self.yarn_mscale:
            conflicts.append(
                f"scales queries and keys by {self.yarn_mscale + 1:.6g}, which the kernel of apply_rope_fusion=True doesn't do: "
                "set apply_rope_fusion=False"
            )
        for problem in conflicts:
            raise ConfigError(f"model.config.rope_stretching={type(self.rope_stretching).__name__} {problem}.")

    # Megatron-Core's attention multiplies rotated channels by (1 + m ln(s) / 10) / (1 + n ln(s) / 10). The next three
    # properties are s, m and n.
    @property
    def yarn_rotary_scaling_factor(self) -> float:
        return math.exp(10.0)

    @property
    def yarn_mscale(self) -> float:
        return 0.0 if self.rope_stretching is None else self.rope_stretching.amplitude - 1.0

    @property
    def yarn_mscale_all_dim(self) -> float:
        return 0.0

    def customize_model(self, model: Any) -> None:
        super().customize_model(model)
        if self.rope_stretching is not None:
            model.rotary_pos_emb = rotary_embedding(
                self, kind=StretchedRotaryEmbedding, stretching=self.rope_stretching, rotary_base=self.rotary_base
            )
