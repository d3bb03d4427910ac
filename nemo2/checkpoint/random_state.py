# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the random streams of a rank.

The saved state consists of tensors and numbers, so nothing must be unpickled. Streams differ between tensor- and
pipeline-parallel ranks. Data-parallel replicas mostly have equal streams, and those of one replica are saved. Where
replicas differ, those of every rank are: expert-parallel ranks have streams of their own, and replicas draw unlike often for
samples of unlike lengths.
"""

import hashlib
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # pyright: ignore[reportPrivateImportUsage]
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from nemo2.base import ranks


def random_state() -> ShardedObject:
    """This rank's streams, as an object that Megatron-Core saves by the rank's position in the layout. Every rank calls it."""
    replicated = _as_object(replicated=True)
    digests = ranks.gather((replicated.unique_key, _digest(replicated.data)))
    return replicated if len({*digests}) == len({key for key, _ in digests}) else _as_object(replicated=False)


def stored_random_state(stored: Collection[str]) -> Optional[ShardedObject]:
    """The request for this rank's streams from a checkpoint of the same layout with the entries ``stored``. None: there are
    none."""
    requests = (_as_object(replicated=replicated) for replicated in (True, False))
    return next((request for request in requests if request.unique_key in stored), None)


def random_states() -> dict[str, dict[str, Any]]:
    """The streams of all positions in the layout, by position. For checkpoints in which one rank writes all plain data.
    Every rank calls it."""
    own: Any = random_state()
    states = ranks.gather({} if own.replica_id else {own.unique_key: own.data})
    return {position: state for part in states for position, state in part.items()}


def own_random_state(states: dict[str, Any]) -> Optional[dict[str, Any]]:
    """This rank's streams in the result of `random_states`, from a run with the same layout. None: they aren't there."""
    request = stored_random_state(states)
    return None if request is None else states[request.unique_key]


def load_random_state(state: dict[str, Any]) -> None:
    """Set the streams to what `random_state` saved. The streams of a GPU have another form than those of a CPU: they restart from
    the seed where the run goes on on the other kind of device."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    tracker = _tracker()
    current = tracker.get_states()
    if any(name in current and not _fits(value, current[name]) for name, value in state["megatron"].items()):
        rank_zero_info(
            "The checkpoint was saved on another kind of device. Random streams of model-parallel ranks restart from the seed, "
            "so dropout differs from here on."
        )
        return
    # Streams that only this run has, such as those of another version of Megatron-Core, start from the seed.
    tracker.set_states(current | {name: _like(value, current.get(name)) for name, value in state["megatron"].items()})


def report_new_random_streams(checkpoint: Path) -> None:
    """Report once that a run that resumes, as in another layout, draws other random numbers."""
    rank_zero_info(
        f"{checkpoint} has no random streams for this layout. They restart from the seed, so dropout differs from here on."
    )


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


def _as_tensor(value: Any) -> torch.Tensor:
    """The state of a stream, which is a tensor, or with CUDA graphs a generator."""
    return value.get_state() if isinstance(value, torch.Generator) else value


def _fits(saved: torch.Tensor, current: Any) -> bool:
    return saved.numel() == _as_tensor(current).numel()


def _like(value: torch.Tensor, current: Any) -> Any:
    if isinstance(current, torch.Generator):
        current.set_state(value)
        return current
    return value


def _as_object(*, replicated: bool) -> ShardedObject:
    """This rank's streams, as those of its position in a replica, or of this rank alone."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    place = [
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()),
        (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()),
    ]
    if not replicated:
        place.append((replica, parallel_state.get_data_parallel_world_size(with_context_parallel=True)))
    offset, shape = zip(*place, strict=True)
    return ShardedObject("random_state", _streams(), shape, offset, replica_id=replica if replicated else 0)


def _streams() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: _as_tensor(value) for name, value in _tracker().get_states().items()},
    }


def _digest(value: Any) -> str:
    """The same for equal streams on every rank."""
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        value = [_digest(part) for part in value]
    content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
    return hashlib.sha256(content).hexdigest()
