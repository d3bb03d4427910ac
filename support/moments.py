# SPDX-License-Identifier: Apache-2.0
"""Reads first-step gradients of strategies that shard parameters from the optimizer's state.

Torch's and Megatron-Core's FSDP store gradients in different ways and then drop them. All keep Adam's first moment,
which after one step is the clipped gradient times ``1 - beta1``, in fp32. The strategies' checkpoints map each rank's
rows of it to the model.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from nemo2.checkpoint.shards import Shard
from nemo2.mcore.parallel.norm_names import renamed_norms
from support.gradients import Name, Piece

KEY = "optimizer.state.exp_avg."
"""In front of the stored name of a parameter."""


def holds_gradients(strategy: Any) -> bool:
    """Whether gradients stand in Megatron-Core's buffers before the optimizer's step, so that no moments are needed."""
    from nemo2.training.strategy import MegatronStrategy

    return isinstance(strategy, MegatronStrategy) and not strategy.fsdp


def first_moments(strategy: Any) -> list[Shard]:
    """This rank's rows of Adam's first moment. Every rank calls it."""
    return [piece for piece in strategy.form.shards(model=False, optimizer=True) if piece.key.startswith(KEY)]


def clipped(norm: float, limit: float) -> float:
    """The factor of gradients that are clipped by their global norm (Megatron-Core ``clip_grad_by_total_norm_fp32``)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def pieces_of(strategy: Any, whole: dict[Name, dict[str, Any]], *, factor: float) -> Iterator[Piece]:
    """This rank's pieces of the gradients before clipping, as `gradients.pieces_of` gives them. Call it after the first step.

    Args:
        whole: The parameters that one process has, by name.
        factor: The ratio of the moments to the gradients: ``(1 - beta1)`` times the factor of clipping.

    Raises:
        AssertionError: one process has no such parameter.
    """
    names = _names(whole)
    renamed = renamed_norms(names)
    by_stored_name = {renamed.get(key, key): key for key in names}
    for moment in first_moments(strategy):
        stored = moment.key.removeprefix(KEY).removeprefix("module.")
        assert stored in by_stored_name, f"one process has no parameter stored as {stored}"
        key = by_stored_name[stored]
        stacked = names[key]
        name = (key, tuple(moment.offset[:stacked]))
        sizes = tuple(moment.tensor.shape[stacked:])
        place = tuple(slice(at, at + size) for at, size in zip(moment.offset[stacked:], sizes, strict=True))
        gradient = moment.tensor.reshape(sizes) / factor
        yield Piece(name, key, place, tuple(moment.global_shape[stacked:]), gradient)


def _names(whole: Iterable[Name]) -> dict[str, int]:
    """The number of leading dimensions of each stored tensor that stack layers and experts, by key."""
    return {key: len(places) for key, places in whole}
