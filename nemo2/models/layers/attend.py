# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of queries over a block of keys: masks, windows, soft-capping and sinks.

Tensors are heads first: `[B, N, S, D]` queries, `[B, G, T, D]` keys, `[B, G, T, E]` values.
scaled_dot_product_attention computes everything that it supports. It doesn't support soft-capped scores and attention
sinks, which are computed step by step in fp32 unless a compiled kernel (`flex`) supports them.
"""

from contextlib import nullcontext
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo2.models.layers.attention_rule import AttentionRule


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    *,
    first_query: int,
    forbidden: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_context: Any = None,
) -> Tensor:
    """`[B, N, S, E]`: every query's mean of the values it may see, weighted by the softmax of its scores.

    Args:
        first_query: the place of the first query among the keys.
        forbidden: True where a key may not be seen, broadcastable to `[B, N, S, T]`.
        sink: `[N]`, a score that takes part in each head's softmax but has no value (arXiv:2309.17453).
        dropout_p: the share of weights that is dropped, under `dropout_context()` where given.

    A query that may see nothing gives zeros.
    """
    start, end = rule.visible(first_query, q.size(2), k.size(2))
    k, v = k[:, :, start:end], v[:, :, start:end]
    if forbidden is not None and forbidden.size(-1) != 1:
        forbidden = forbidden[..., start:end]
    if end == start:
        return q.new_zeros(*q.shape[:3], v.size(3))
    offset, num_queries, num_keys = first_query - start, q.size(2), end - start
    plain = rule.softcap is None and sink is None
    triangle = offset == 0 and num_queries == num_keys and rule.causal and (rule.left is None or rule.left >= num_keys)
    others = forbidden is not None or sink is not None or dropout_p > 0.0
    if not (plain and triangle):
        from nemo2.models.layers import flex

        if flex.takes(q, k, v, rule, offset, others=others):
            return flex.attend_compiled(q, k, v, rule, offset)
    dropping = dropout_context() if dropout_context is not None and dropout_p > 0.0 else nullcontext()
    if plain and triangle and forbidden is None:
        with dropping:  # without a mask, so that torch may pick a kernel that never makes one
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout_p, scale=rule.scale, enable_gqa=q.size(1) != k.size(1)
            )
    allowed = rule.allowed(offset, num_queries, num_keys, q.device)
    if forbidden is not None:
        allowed = ~forbidden.bool() if allowed is None else allowed & ~forbidden.bool()
    with dropping:
        if plain:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=dropout_p, scale=rule.scale, enable_gqa=q.size(1) != k.size(1)
            )
        return _step_by_step(q, k, v, rule, allowed, sink, dropout_p)


def scores_of(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor:
    """`[B, G, N / G, S, T]` in fp32 or wider, soft-capped but not masked: head n of the queries reads group n // (N/G)."""
    q = q.unflatten(1, (k.size(1), -1))
    scores = torch.einsum("bgrsd,bgtd->bgrst", wide(q), wide(k)) * rule.scale
    return scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)


def _step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    allowed: Optional[Tensor],
    sink: Optional[Tensor],
    dropout_p: float,
) -> Tensor:
    scores = scores_of(q, k, rule)
    if allowed is not None:
        if allowed.dim() == 4:  # of [B, N, S, T]: the heads by group
            allowed = allowed.unflatten(1, (k.size(1), -1)) if allowed.size(1) > 1 else allowed.unsqueeze(2)
        # Not -inf: a row without any key would become NaN. Its weights are cleared below instead.
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sink is None:
        weights = scores.softmax(dim=-1)
    else:
        column = sink.to(scores.dtype).view(1, k.size(1), -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    weights = F.dropout(weights, dropout_p)
    return torch.einsum("bgrst,bgte->bgrse", weights.to(v.dtype), v).flatten(1, 2)


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, in which sums and lengths are computed. float64 stays unchanged."""
    return x if x.dtype == torch.float64 else x.float()
