# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values travel from rank to rank, and no rank ever holds more than two shares of them.

Liu et al., arXiv:2310.01889. Each rank keeps its queries and, cp times, attends over the keys that are visiting, merging
the partial results by their log-sum-exp (the online softmax of arXiv:1805.02867). Meanwhile these keys are on their way to
the next rank already, and those of the rank before arrive. The backward pass recomputes the weights from the log-sum-exp, as
FlashAttention does (arXiv:2205.14135, appendix B); the gradients of keys and values follow them once a rank has added its
part, and arrive home in the end. Chunks that cannot see each other are skipped, so causal attention is the same work on every
rank (`chunks.py`).

Tensors are heads first: `[B, N, S, D]` queries, `[B, G, S, D]` keys, `[B, G, S, E]` values, with S this rank's tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, get_global_rank, irecv, isend

from nemo2.models.layers.attend import scores_of
from nemo2.models.layers.attention_rule import AttentionRule
from nemo2.models.layers.chunks import Chunk, Span, chunks_of


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    sequences: Sequence[Span],
    group: ProcessGroup,
    *,
    sink: Optional[Tensor] = None,
) -> Tensor:
    """`[B, N, S, E]`: what `attend` gives for this rank's queries and the whole sequences' keys, without dropout.

    sink: `[N]`, see `attend`. Every rank of `group` must call.
    """
    out, log_sum = _Ring.apply(q, k, v, rule, sequences, group)  # pyright: ignore[reportGeneralTypeIssues]
    if sink is not None:
        # A score without a value only takes its share of the weights.
        out = out * torch.sigmoid(log_sum - sink.to(log_sum.dtype)[:, None])[..., None]
    return out.to(q.dtype)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sequences: Sequence[Span], group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """The attention and the log-sum-exp of each query's scores, `[B, N, S]`, both in fp32."""
        ctx.rule, ctx.sequences, ctx.group = rule, sequences, group
        exact = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.size(3), dtype=exact)
        log_sum = q.new_full(q.shape[:3], float("-inf"), dtype=exact)
        visitors = [k.contiguous(), v.contiguous()]
        for step, home in enumerate(_homes(group)):
            k_now, v_now = visitors
            on_their_way = _Passing(visitors if step < group.size() - 1 else [], group)
            for mine, theirs, allowed in _meetings(rule, sequences, group, home, q.device):
                scores = _masked(scores_of(q[:, :, mine], k_now[:, :, theirs], rule), allowed)
                block_sum = scores.logsumexp(dim=-1)
                weights = _safe_exp(scores - block_sum[..., None])
                block = torch.einsum("bgrst,bgte->bgrse", weights, v_now[:, :, theirs].to(exact)).flatten(1, 2)
                _merge(out[:, :, mine], log_sum[:, :, mine], block, block_sum.flatten(1, 2))
            visitors = on_their_way.arrived()
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out, log_sum

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_log_sum: Tensor) -> tuple[Optional[Tensor], ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, log_sum = ctx.saved_tensors
        rule, sequences, group = ctx.rule, ctx.sequences, ctx.group
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        # d loss / d score = weight * (d loss / d weight - what all weights of the row have in common).
        common = (grad_out * out).sum(dim=-1) - grad_log_sum
        visitors = [k.contiguous(), v.contiguous()]
        grad_k, grad_v = (torch.zeros_like(x, dtype=out.dtype) for x in visitors)
        for step, home in enumerate(_homes(group)):
            k_now, v_now = visitors
            on_their_way = _Passing(visitors if step < group.size() - 1 else [], group)
            for mine, theirs, allowed in _meetings(rule, sequences, group, home, q.device):
                groups = k.size(1)
                rows = [x[:, :, mine].unflatten(1, (groups, -1)) for x in (q, grad_out, log_sum, common)]
                q_rows, grad_rows, sum_rows, common_rows = rows
                scores = scores_of(q[:, :, mine], k_now[:, :, theirs], rule)
                weights = _safe_exp(_masked(scores, allowed) - sum_rows[..., None])
                grad_v[:, :, theirs] += torch.einsum("bgrst,bgrse->bgte", weights, grad_rows)
                grad_weights = torch.einsum("bgrse,bgte->bgrst", grad_rows, v_now[:, :, theirs].to(out.dtype))
                grad_scores = weights * (grad_weights - common_rows[..., None]) * rule.scale
                if rule.softcap is not None:
                    grad_scores = grad_scores * (1.0 - (scores / rule.softcap).square())
                k_block = k_now[:, :, theirs].to(out.dtype)
                grad_q[:, :, mine] += torch.einsum("bgrst,bgtd->bgrsd", grad_scores, k_block).flatten(1, 2)
                grad_k[:, :, theirs] += torch.einsum("bgrst,bgrsd->bgtd", grad_scores, q_rows.to(out.dtype))
            visitors = on_their_way.arrived()
            grad_k, grad_v = _Passing([grad_k, grad_v], group).arrived()  # after cp steps they are home
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _homes(group: ProcessGroup) -> Iterator[int]:
    """The rank whose keys are here at each step: this rank first, then the rank before it, and so on."""
    for step in range(group.size()):
        yield (group.rank() - step) % group.size()


def _meetings(
    rule: AttentionRule, sequences: Sequence[Span], group: ProcessGroup, home: int, device: torch.device
) -> Iterator[tuple[slice, slice, Optional[Tensor]]]:
    """Places of queries, places of keys and what may be seen (None: all), for each two chunks that see each other."""
    cp = group.size()
    by_sequence: dict[int, list[Chunk]] = {}
    for chunk in chunks_of(sequences, cp, home):
        by_sequence.setdefault(chunk.sequence, []).append(chunk)
    for mine in chunks_of(sequences, cp, group.rank()):
        for theirs in by_sequence[mine.sequence]:
            offset = mine.position - theirs.position
            start, end = rule.visible(offset, mine.length, theirs.length)
            if start < end:
                yield mine.places, theirs.places, rule.allowed(offset, mine.length, theirs.length, device)


def _masked(scores: Tensor, allowed: Optional[Tensor]) -> Tensor:
    return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


def _safe_exp(difference: Tensor) -> Tensor:
    """exp, where -inf minus -inf, a row that sees nothing, counts as weight zero."""
    return torch.nan_to_num(difference, nan=float("-inf"), neginf=float("-inf")).exp()


def _merge(out: Tensor, log_sum: Tensor, block: Tensor, block_sum: Tensor) -> None:
    """Adds a block of keys to what a run of queries has seen so far, in place."""
    total = torch.logaddexp(log_sum, block_sum)
    before, now = _safe_exp(log_sum - total), _safe_exp(block_sum - total)
    out.mul_(before[..., None]).add_(block * now[..., None])
    log_sum.copy_(total)


class _Passing:
    """Tensors on their way to the next rank of the ring, and those of the rank before on theirs to this one. What is sent may
    be read meanwhile, not written."""

    def __init__(self, tensors: list[Tensor], group: ProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        after = get_global_rank(group, (rank + 1) % size)
        before = get_global_rank(group, (rank - 1) % size)
        self._received = [torch.empty_like(x) for x in tensors]
        self._work = []
        for mine, theirs in zip(tensors, self._received, strict=True):
            # One tensor at a time: with two ranks both neighbors are the same peer, and messages are matched by their
            # order.
            operations = [P2POp(isend, mine, after, group), P2POp(irecv, theirs, before, group)]
            self._work += batch_isend_irecv(operations)

    def arrived(self) -> list[Tensor]:
        """The tensors of the previous rank, once they have arrived and this rank's own have left."""
        for work in self._work:
            work.wait()
        return self._received
