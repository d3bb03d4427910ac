# SPDX-License-Identifier: Apache-2.0
"""Causal attention within chunks of a sequence, as in Llama 4, by any core attention.

Source: the modeling code of Llama 4 in Hugging Face transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from nemo2.base.errors import ConfigError


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
