# SPDX-License-Identifier: Apache-2.0
"""The text models of Llama 4 Scout (16 experts) and Maverick (128 experts).

Every fourth layer has no positions. The other layers rotate them and attend only within their chunk of 8,192 tokens.
Each token uses one routed expert, and all tokens use a shared expert. Sources: config.json and modeling code of
meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E in Hugging Face transformers. The vision tower is not
included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Optional, Union

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.models.layers.queries import sharpen_far_queries
from nemo2.models.layers.spec import changed_layer_spec
from nemo2.models.llama import Llama3Config
from nemo2.models.rotary import scale_positions


def attend_in_chunks(core_attention: nn.Module, chunk: int) -> None:
    """Make a causal core attention attend only within chunks of ``chunk`` tokens.

    The chunks of a sequence become additional samples of the batch. The last one is padded with zeros, which causal
    attention hides from real tokens. Chunks of packed sequences become packed sequences. Rotary positions, which are
    applied before, may remain those of the whole sequence, because scores depend on differences only. Tensors are
    ``[sequence, batch, heads, channels]``, or packed ``[tokens, heads, channels]``.

    The attention raises:
        ConfigError: there are fewer queries than keys but more than one, or a mask is passed.
    """
    core_attention.forward = partial(_forward_in_chunks, core_attention.forward, chunk)


def _forward_in_chunks(
    forward: Callable[..., Tensor],
    chunk: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor] = None,
    **kwargs: Any,
) -> Tensor:
    packed = kwargs.get("packed_seq_params")
    if packed is not None:
        kwargs["packed_seq_params"] = _packed_in_chunks(packed, chunk)
        return forward(query, key, value, attention_mask, **kwargs)
    length, batch = query.shape[:2]
    if key.size(0) <= chunk:
        return forward(query, key, value, attention_mask, **kwargs)
    if length == 1:  # the newest token, over a cache
        start = (key.size(0) - 1) // chunk * chunk
        return forward(query, key[start:], value[start:], attention_mask, **kwargs)
    if length != key.size(0) or attention_mask is not None and attention_mask.size(-2) > 1:
        raise ConfigError(
            f"model.config.attention_chunk_size={chunk} splits only whole causal sequences without another mask; this call has "
            f"{length} queries and {key.size(0)} keys. With a cache, feed one token at a time. Otherwise set "
            "attention_chunk_size=None."
        )

    def folded(x: Tensor) -> Tensor:
        """``[chunk, chunks * batch, heads, channels]``"""
        whole = F.pad(x, [0, 0, 0, 0, 0, 0, 0, -length % chunk])
        return whole.unflatten(0, (-1, chunk)).transpose(0, 1).flatten(1, 2)

    output = forward(folded(query), folded(key), folded(value), None, **kwargs)
    return output.unflatten(1, (-1, batch)).transpose(0, 1).flatten(0, 1)[:length]


def _packed_in_chunks(packed: PackedSeqParams, chunk: int) -> PackedSeqParams:
    """The chunks of packed sequences, as packed sequences. Padding after a sequence stays after its last tokens."""
    real, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    assert real is not None, "sequences of the format thd come with their ends"
    lengths, rooms = real.diff(), (real if padded is None else padded).diff()
    counts = (rooms + chunk - 1) // chunk
    within = torch.arange(int(counts.sum()), device=real.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    cut = {}
    for name, sizes in (("real", lengths), ("padded", rooms)):
        pieces = (sizes.repeat_interleave(counts) - within * chunk).clamp(0, chunk)
        cut[name] = F.pad(pieces.cumsum(0), [1, 0]).to(real.dtype)
    longest = None if packed.max_seqlen_q is None else min(int(packed.max_seqlen_q), chunk)
    ends: dict[str, Any] = {"cu_seqlens_q": cut["real"], "cu_seqlens_kv": cut["real"]}
    if padded is not None:
        ends |= {"cu_seqlens_q_padded": cut["padded"], "cu_seqlens_kv_padded": cut["padded"]}
    return replace(packed, **ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def llama4_layer_spec(config: Any, vp_stage: Optional[int] = None) -> ModuleSpec:
    """The default layers. Layers without positions also have no norm of queries and keys."""

    def leave_out_norms(parts: Any, number: int) -> None:
        if config.no_rope_freq and config.no_rope_freq[number - 1]:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = IdentityOp

    return changed_layer_spec(config, leave_out_norms, vp_stage=vp_stage)


@configurable(nope_layer_interval="no_rope_freq")
@dataclass
class Llama4Config(Llama3Config):
    """Settings that Scout and Maverick share."""

    num_layers: int = 48
    hidden_size: int = 5120
    ffn_hidden_size: Optional[int] = 16384
    num_attention_heads: int = 40
    vocab_size: Optional[int] = 202048
    rotary_interleaved: bool = True
    apply_rope_fusion: bool = False
    no_rope_freq: Optional[Union[int, list[int]]] = 4
    """Every n-th layer has no positions. A list has an entry per layer: 1 for a layer without positions."""
    rope_scaling: bool = True
    """Whether rotary frequencies are scaled by ``rope_scaling_factor``, as in Llama 3.1."""
    # NeMo 2.0 has Llama 3.1's (8, 1, 4).
    rope_scaling_factor: float = 16.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """If it equals ``low_freq_factor``, each frequency is either kept or divided, without a transition."""
    old_context_len: int = 8192
    attention_chunk_size: Optional[int] = 8192
    """The size of the chunk, in tokens, within which layers with positions attend. None: they attend to all previous
    tokens."""
    attn_temperature_tuning: bool = True
    """Multiply the query at position p by 1 + ``attn_scale`` ln(1 + floor((p + 1) / ``floor_scale``)) in layers
    without positions. The factor is 1 up to that position (arXiv:2501.19399). NeMo 2.0 leaves it out."""
    floor_scale: int = 8192
    attn_scale: float = 0.1
    qk_l2_norm: bool = True
    """Divide queries and keys by their root mean square, without weights."""
    moe_grouped_gemm: bool = True
    moe_shared_expert_intermediate_size: Optional[int] = 8192
    moe_ffn_hidden_size: Optional[int] = 8192
    moe_router_topk: int = 1
    moe_router_score_function: Literal["softmax", "sigmoid"] = "sigmoid"
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = None
    moe_apply_probs_on_input: bool = True
    moe_shared_expert_overlap: bool = True
    transformer_layer_spec: Any = llama4_layer_spec

    def customize_model(self, model: Any) -> None:
        """Scale rotary frequencies, and let layers attend in chunks or sharpen far queries.

        Raises:
            ConfigError: sequences longer than a chunk are split over context-parallel ranks.
        """
        chunk, cp = self.attention_chunk_size, self.context_parallel_size
        if chunk is not None and cp > 1 and self.seq_length > chunk:
            raise ConfigError(
                f"model.config.attention_chunk_size={chunk} needs whole sequences if seq_length={self.seq_length} is longer than "
                f"a chunk, but context_parallel_size={cp} shards sequences. Set context_parallel_size=1, or "
                "attention_chunk_size=None for full attention."
            )
        super().customize_model(model)
        if self.rope_scaling:
            scale_positions(model, self, scale_factor=self.rope_scaling_factor)
        skips: Any = self.no_rope_freq or [0] * self.num_layers
        for layer in model.decoder.layers:
            core_attention = layer.self_attention.core_attention
            if skips[layer.layer_number - 1]:
                if self.attn_temperature_tuning:
                    sharpen_far_queries(core_attention, floor=self.floor_scale, factor=self.attn_scale, first=1)
            elif chunk is not None and cp == 1:
                attend_in_chunks(core_attention, chunk)


class Llama4Experts16Config(Llama4Config, num_moe_experts=16):
    """Scout: 107.8 B parameters without the vision tower, 17 B of them used per token; experts in every layer."""


class Llama4Experts128Config(
    Llama4Config, num_moe_experts=128, rope_scaling=False, moe_layer_freq=[0, 1] * 24, qk_l2_norm=False
):
    """Maverick: 400.7 B parameters without the vision tower, 17 B of them used per token; experts in every other layer."""
