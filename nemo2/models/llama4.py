# SPDX-License-Identifier: Apache-2.0
"""Llama 4 Scout (16 experts) and Maverick (128), their text models.

Every fourth layer has no positions; the others rotate them and see only their own chunk of 8,192 tokens. One expert per
token, beside one that all share. Sources: config.json and modeling code of meta-llama/Llama-4-Scout-17B-16E and
Llama-4-Maverick-17B-128E in Hugging Face transformers. Not here: the vision tower, and the scaling of queries beyond
8,192 tokens in layers without positions, which NeMo 2.0 leaves out too.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Optional, Union

from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.models.gpt import default_layer_spec
from nemo2.models.llama import Llama3Config, scale_rotary_frequencies


def llama4_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers, those without positions also without the norm of queries and keys."""
    spec: Any = copy.deepcopy(default_layer_spec(config, vp_stage=vp_stage))
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = [copy.deepcopy(layer) for layer in spec.submodules.layer_specs]
    for index, layer in enumerate(layers, start=offset):
        if config.no_rope_freq and config.no_rope_freq[index]:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = IdentityOp
    spec.submodules.layer_specs = layers
    return spec


@configurable(nope_layer_interval="no_rope_freq")
@dataclass
class Llama4Config(Llama3Config):
    """Settings that Scout and Maverick share."""

    rotary_base: int = 500_000
    seq_length: int = 8192
    num_layers: int = 48
    hidden_size: int = 5120
    ffn_hidden_size: Optional[int] = 16384
    num_attention_heads: int = 40
    vocab_size: Optional[int] = 202048
    rotary_interleaved: bool = True
    apply_rope_fusion: bool = False
    no_rope_freq: Optional[Union[int, list[int]]] = 4
    """Every n-th layer has no positions; or, layer by layer, 1 where it has none."""
    rope_scaling: bool = True
    """Whether rotary frequencies are stretched, as in Llama 3.1, by ``rope_scaling_factor``."""
    rope_scaling_factor: float = 8.0
    attention_chunk_size: Optional[int] = 8192
    """Layers with positions see their own chunk of so many tokens; None lets them see everything before."""
    qk_l2_norm: bool = True
    """Queries and keys are divided by their root mean square, without weights."""
    moe_grouped_gemm: bool = True
    moe_shared_expert_intermediate_size: Optional[int] = 8192
    moe_ffn_hidden_size: Optional[int] = 8192
    moe_router_topk: int = 1
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "sigmoid"
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = None
    moe_apply_probs_on_input: bool = True
    moe_shared_expert_overlap: bool = True
    moe_permute_fusion: bool = False
    transformer_layer_spec: Any = llama4_layer_spec

    def configure_model(
        self,
        tokenizer: Any,
        pre_process: Optional[bool] = None,
        post_process: Optional[bool] = None,
        vp_stage: Optional[int] = None,
    ) -> MegatronGPTModel:
        """Parameters and result are those of the parent's method.

        Raises:
            ConfigError: sequences longer than a chunk that can't be cut into whole ones, or are spread over
                context-parallel ranks.
        """
        chunk = self.attention_chunk_size
        chunked = chunk is not None and self.seq_length > chunk
        if chunk is not None and chunked and (self.seq_length % chunk or self.context_parallel_size > 1):
            raise ConfigError(
                f"model.config.attention_chunk_size={chunk} cuts sequences longer than that, and seq_length="
                f"{self.seq_length} with context_parallel_size={self.context_parallel_size} can't be cut: use a multiple "
                "of it and no context parallelism, or attention_chunk_size=None for full attention."
            )
        model = super().configure_model(tokenizer, pre_process, post_process, vp_stage)
        if self.rope_scaling:
            model.rotary_pos_emb.inv_freq = scale_rotary_frequencies(
                model.rotary_pos_emb.inv_freq,
                scale_factor=self.rope_scaling_factor,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                old_context_len=8192,
            )
        if chunk is not None and chunked:
            skips: Any = self.no_rope_freq or [0] * self.num_layers
            layers: Any = model.decoder.layers
            for layer in layers:
                if not skips[layer.layer_number - 1]:
                    attend_in_chunks(layer.self_attention.core_attention, chunk)
        return model


@configurable
@dataclass
class Llama4Experts16Config(Llama4Config):
    """Scout: 107.8 B parameters without the vision tower, 17 B of them used per token; experts in every layer."""

    num_moe_experts: Optional[int] = 16


@configurable
@dataclass
class Llama4Experts128Config(Llama4Config):
    """Maverick: 400.7 B parameters without the vision tower, 17 B of them used per token; experts in every other layer."""

    num_moe_experts: Optional[int] = 128
    rope_scaling: bool = False
    moe_layer_freq: Union[int, list[int]] = field(default_factory=lambda: [0, 1] * 24)
    qk_l2_norm: bool = False


def attend_in_chunks(core_attention: nn.Module, chunk: int) -> None:
    """Makes a causal core attention see only its own chunk of ``chunk`` tokens.

    The chunks of a sequence are handed over as further samples of the batch. Rotary positions, applied before, may stay
    those of the whole sequence: scores depend on differences only. Tensors are ``[sequence, batch, heads, channels]``.
    """
    core_attention.forward = partial(_forward_in_chunks, core_attention.forward, chunk)


def _forward_in_chunks(
    forward: Callable[..., Tensor], chunk: int, query: Tensor, key: Tensor, value: Tensor, *others: Any, **kwargs: Any
) -> Tensor:
    if kwargs.get("packed_seq_params") is not None:
        raise ConfigError(
            "Packed sequences longer than model.config.attention_chunk_size are not cut: shorten data.seq_length, or set "
            "attention_chunk_size=None."
        )
    length, batch = query.shape[:2]
    if length <= chunk:
        return forward(query, key, value, *others, **kwargs)
    folded = (x.unflatten(0, (-1, chunk)).transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    output = forward(*folded, *others, **kwargs)
    return output.unflatten(1, (-1, batch)).transpose(0, 1).flatten(0, 1)
