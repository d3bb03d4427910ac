# SPDX-License-Identifier: Apache-2.0
"""The weights of extra losses where each trained token counts the same.

With ``calculate_per_token_loss`` every gradient of a step is divided by its trained tokens N at the end. The losses of routers
and of multi-token prediction are means over other tokens, so they must be multiplied by N first: a micro-batch's router loss,
a mean over its T tokens without padding, by T * N / T', where T' is the sum of T over the global batch; the loss of the token
at distance d by N / N_d, where N_d counts the trained tokens with a token at that distance. The sum of the weights is then 1
for every mask, padding, packing and layout. Megatron-Core multiplies by the tokens of a micro-batch, padding included, as if
all were trained: with answers only, padded to a fixed length, a coefficient acted 19 times as strongly.

The ratios N / T' and N / N_d are known before a step begins, because every rank loads its share of the global batch whole.
They belong to the process, as Megatron-Core's scales of these losses do, and are written in place, where a captured CUDA graph
reads them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

ALL, PRESENT = "all tokens", "tokens without padding"
_RATIOS: dict[str, Tensor] = {}


def further(distance: int) -> str:
    """The name of the trained tokens with a token ``distance`` ahead."""
    return f"tokens with one {distance} ahead"


def trained_over(tokens: str) -> Tensor:
    """The trained tokens of the current step over `ALL`, `PRESENT` or `further` tokens of its global batch: fp32, a scalar.

    1 before the first step, and if the batches say nothing of the tokens.
    """
    from nemo2.base.backend import get_backend

    device = get_backend().device
    if tokens not in _RATIOS or _RATIOS[tokens].device.type != device.type:
        _RATIOS[tokens] = torch.ones((), device=device)
    return _RATIOS[tokens]


def count_step_tokens(microbatches: Iterable[Any], *, mtp_num_layers: int) -> None:
    """Count the tokens of a training step whose share of this rank is ``microbatches``. Every rank must call it.

    A micro-batch is a dictionary with ``loss_mask`` ``[batch, sequence]``, and optionally ``padding_mask`` of the same shape
    and ``cu_seqlens``. In others every token counts as trained. Costs one all-reduce of a few numbers over the data-parallel
    ranks.
    """
    names = [ALL, PRESENT, *(further(distance + 1) for distance in range(mtp_num_layers))]
    counts = [_counts(batch, mtp_num_layers) for batch in microbatches]
    if any(count is None for count in counts):
        for name in names:
            trained_over(name).fill_(1.0)
        return
    total = torch.stack([count for count in counts if count is not None]).sum(dim=0).float()
    if not total.is_meta:  # a rehearsal's batch has no values
        total = total.to(trained_over(ALL).device)
    group: Any = parallel_state.get_data_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(total, group=group)
    if total.is_meta:
        return
    for name, count in zip(names, total[1:], strict=True):
        trained_over(name).copy_(total[0] / count.clamp(min=1))


def _counts(batch: Any, depth: int) -> Tensor | None:
    """Trained tokens, all tokens, tokens without padding, and trained tokens with one 1, 2 ... ahead. int64."""
    batch = batch[0] if isinstance(batch, tuple) and batch else batch
    mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        return None
    padding = batch.get("padding_mask")
    # Whole numbers for each micro-batch, as the loss counts them.
    counts = [mask.sum(), torch.full((), mask.numel(), device=mask.device)]
    counts.append(counts[1] if padding is None else (~padding.to(mask.device)).sum())
    # [rows, sequence]: whether a sequence starts at the token.
    starts = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
    starts[:, 0] = True
    if batch.get("cu_seqlens") is not None:
        ends = batch["cu_seqlens"].flatten().to(mask.device)
        if batch.get("cu_seqlens_argmin") is not None:
            ends = ends[: int(batch["cu_seqlens_argmin"])]
        starts[:, ends[(ends >= 0) & (ends < mask.size(1))].long()] = True
    counts += [_with_one_ahead(mask, starts, distance + 1) for distance in range(depth)]
    return torch.stack([count.to(torch.int64) for count in counts])


def _with_one_ahead(mask: Tensor, starts: Tensor, distance: int) -> Tensor:
    """Megatron-Core shifts the mask: what counts is each trained token that isn't among the first of its sequence."""
    first = starts.clone()
    for shift in range(1, distance):
        first[:, shift:] |= starts[:, :-shift]
    return (mask * ~first).sum()
