# SPDX-License-Identifier: Apache-2.0
"""Every parameter's gradient, whatever the layout: written by one process, compared by many.

Where a rank's piece belongs in the whole parameter is what Megatron-Core's own description for checkpoints says, layers
and experts one by one. Each rank compares each of its pieces, replicas included, so that a copy that was not summed like
the others is seen; no tensor travels.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo2.mcore.parallel.sharded_state import sharded_state
from nemo2.mcore.parallel.transform import record_of

Name = tuple[str, tuple[int, ...]]
"""A parameter in every layout: Megatron-Core's key, and which of the tensors that share it (layer, expert)."""


@dataclass(frozen=True)
class Piece:
    """A rank's shard of a parameter's gradient, and where in the parameter it stands."""

    name: Name
    label: str
    place: tuple[slice, ...]
    shape: tuple[int, ...]
    gradient: Tensor


@dataclass(frozen=True)
class Difference:
    """The distance of one piece from the reference, squared; ``place`` tells which pieces are copies of each other."""

    name: Name
    place: tuple[tuple[int, int], ...]
    squared: float


def pieces_of(megatron_parallel: Any) -> Iterator[Piece]:
    """This rank's pieces, of all its pipeline chunks. Call it after backward, before the optimizer's step.

    Raises:
        AssertionError: a parameter that is trained is not in Megatron-Core's description, or has no gradient.
    """
    for chunk in megatron_parallel:
        _complete(chunk)
    for core in megatron_parallel.unwrapped:
        described: set[int] = set()
        for label, node in _described(core).items():
            parameter = getattr(node, "data", None)
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                continue
            described.add(id(parameter))
            for tensor in _tensors(node, gradient):
                layers = tensor.prepend_axis_num
                *_, place = _split(tensor.global_slice(), layers)
                name = (tensor.key.removeprefix("module."), tuple(tensor.global_offset[:layers]))
                yield Piece(name, label, place, tuple(tensor.global_shape[layers:]), tensor.data)
        left = [name for name, p in core.named_parameters() if p.requires_grad and id(p) not in described]
        assert not left, f"no gradient is described for {left}"


def without_padding(pieces: Iterable[Piece], tokens: int) -> Iterator[Piece]:
    """The pieces, cut to the rows of the vocabulary that stand for one of the ``tokens``: how many pad it is the layout's.

    Raises:
        AssertionError: a row of padding has a gradient.
    """
    for piece in pieces:
        if not piece.name[0].endswith(("word_embeddings.weight", "output_layer.weight")) or piece.shape[0] <= tokens:
            yield piece
            continue
        rows, *columns = piece.place
        kept = max(0, min(rows.stop, tokens) - rows.start)
        assert not piece.gradient[kept:].any(), f"padding of {piece.label} has a gradient"
        place = (slice(rows.start, rows.start + kept), *columns)
        if kept:
            yield replace(piece, place=place, shape=(tokens, *piece.shape[1:]), gradient=piece.gradient[:kept])


def whole_gradients(pieces: Iterable[Piece]) -> dict[Name, dict[str, Any]]:
    """The gradients of a process that holds the whole model: name to ``{"label", "gradient"}``."""
    whole: dict[Name, dict[str, Any]] = {}
    for piece in pieces:
        entry = whole.setdefault(
            piece.name, {"label": piece.label, "gradient": torch.full(piece.shape, float("nan"), dtype=torch.float32)}
        )
        entry["gradient"][piece.place] = piece.gradient.float()
    torn = [entry["label"] for entry in whole.values() if entry["gradient"].isnan().any()]
    assert not torn, f"one process doesn't hold the whole of {torn}, or they aren't numbers"
    return whole


def differences(pieces: Iterable[Piece], whole: dict[Name, dict[str, Any]]) -> list[Difference]:
    """Distances of this rank's pieces."""
    found = []
    for piece in pieces:
        assert piece.name in whole, f"one process has no parameter {piece.name}"
        error = piece.gradient.double() - whole[piece.name]["gradient"][piece.place].double()
        place = tuple((part.start, part.stop) for part in piece.place)
        found.append(Difference(piece.name, place, float(error.square().sum())))
    return found


def between(one: dict[Name, dict[str, Any]], other: dict[Name, dict[str, Any]]) -> dict[str, float]:
    """Per parameter, the norm of the difference of two processes' gradients over the norm of the second's."""
    pairs = {
        entry["label"]: (one[name]["gradient"].double(), entry["gradient"].double()) for name, entry in other.items()
    }
    return {label: float((first - second).norm() / second.norm()) for label, (first, second) in pairs.items()}


def relative_errors(found: Iterable[Difference], whole: dict[Name, dict[str, Any]]) -> dict[str, float]:
    """Per parameter, the norm of the difference over the norm of the reference; of copies the worst one counts.

    A reference of zeros (an expert that no token visited) wants zeros: anything else is infinitely wrong.

    Raises:
        AssertionError: the ranks' pieces together aren't the whole model.
    """
    worst: dict[Name, dict[tuple[tuple[int, int], ...], float]] = {}
    for difference in found:
        places = worst.setdefault(difference.name, {})
        # A NaN is the worst of all, and `max` would overlook it.
        squared = difference.squared if difference.squared == difference.squared else float("inf")
        places[difference.place] = max(squared, places.get(difference.place, 0.0))
    errors = {}
    for name, entry in whole.items():
        gradient, places = entry["gradient"], worst.get(name, {})
        covered = sum(_numel(place) for place in places)
        assert covered == gradient.numel(), f"{entry['label']}: ranks hold {covered} of {gradient.numel()} elements"
        error, norm = sum(places.values()) ** 0.5, float(gradient.double().norm())
        errors[entry["label"]] = error / norm if norm else (float("inf") if error else 0.0)
    return errors


def _described(core: Any) -> dict[str, Any]:
    """Megatron-Core's description of a chunk; of one to which a transform has added parameters, nemo2's."""
    if record_of(core) is None:
        return core.sharded_state_dict(metadata={})
    return {label.removeprefix("module."): node for label, node in sharded_state(core, {}).items()}


def _complete(chunk: Any) -> None:
    """With ZeRO, a rank reduces only its shard of the gradient buffers: fetch the other shards. Their own ranks are the
    only ones that read them, so training goes on as before."""
    ddp_config = getattr(chunk, "ddp_config", None)
    if ddp_config is None or not ddp_config.use_distributed_optimizer:
        return
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        owners = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shares = list(bucket.grad_data.view(owners.size(), -1).unbind())
            torch.distributed.all_gather(shares, shares[owners.rank()].clone(), group=owners)


def _tensors(node: Any, gradient: Tensor) -> list[Any]:
    """The ShardedTensors of a node of a sharded state, with the gradient in the parameter's place."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(node, ShardedTensorFactory):
        return _flat(replace(node, data=gradient).build())
    assert isinstance(node, ShardedTensor) and tuple(node.local_shape) == tuple(gradient.shape), node
    return [replace(node, data=gradient, dtype=gradient.dtype)]


def _flat(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [tensor for value in node.values() for tensor in _flat(value)]
    if isinstance(node, (list, tuple)):
        return [tensor for value in node for tensor in _flat(value)]
    return [node]


def _split(place: tuple[Any, ...], layers: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    return tuple(place[:layers]), tuple(place[layers:])


def _numel(place: tuple[tuple[int, int], ...]) -> int:
    total = 1
    for start, stop in place:
        total *= stop - start
    return total
