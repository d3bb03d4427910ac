# SPDX-License-Identifier: Apache-2.0
"""Process groups and random-number streams of the parallel layout, created by Megatron-Core."""

import contextlib
import gc
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any, Optional, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch.distributed.device_mesh import DeviceMesh

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.layout import SIZE_FIELDS, Layout

DEFAULT_SEED = 1234
"""Megatron-LM's default. ``lightning.seed_everything`` sets another."""

_initialized: Optional[tuple[Any, dict[str, Any]]] = None
"""One of the groups that this module created, and Megatron-Core's arguments for the groups. None: no groups."""


def initialize_model_parallel(layout: Layout, *, timeout: Optional[timedelta] = None, **options: Any) -> None:
    """Create Megatron-Core's groups for a layout.

    Groups that this module created with the same arguments stay. Groups with other arguments are destroyed first.
    Groups that the caller created are used.

    Args:
        layout: The layout, which is checked against the world size before any group is created.
        timeout: The longest time of a collective. None: Megatron-Core's 30 minutes.
        options: Further arguments of Megatron-Core's ``initialize_model_parallel``.

    Raises:
        ConfigError: the layout doesn't fit the world, or the caller's groups are of another layout.
    """
    global _initialized
    layout.data_parallel_size(torch.distributed.get_world_size())
    if timeout is not None:
        options["distributed_timeout_minutes"] = max(1, round(timeout.total_seconds() / 60))
    arguments = _sizes(layout) | options
    if parallel_state.model_parallel_is_initialized():
        if _initialized is None or _initialized[0] is not parallel_state.get_tensor_model_parallel_group():
            use_existing_groups(layout)
            return
        if _initialized[1] == arguments:
            return
        destroy_model_parallel()
    parallel_state.initialize_model_parallel(**arguments)
    _initialized = parallel_state.get_tensor_model_parallel_group(), arguments


def use_existing_groups(layout: Layout) -> None:
    """Accept groups that the caller created.

    Raises:
        ConfigError: there are no groups, or the groups are of another layout.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "strategy.init_model_parallel=False, but Megatron-Core's process groups don't exist. Call "
            "megatron.core.parallel_state.initialize_model_parallel before the trainer runs, or leave "
            "init_model_parallel=True."
        )
    there = {
        name: getattr(parallel_state, f"get_{name.removesuffix('size')}world_size")() for name in SIZE_FIELDS.values()
    }
    requested = _sizes(layout) | {"expert_tensor_parallel_size": layout.expert_tensor_size}
    if problems := [
        f"strategy.{name}={requested[name]} contradicts Megatron-Core's existing process groups, which have {name}={size}"
        for name, size in there.items()
        if (requested[name] or 1) != (size or 1)
    ]:
        raise ConfigError(
            f"{'; '.join(problems)}. Set the strategy's sizes to those of the groups, or destroy the groups with "
            "megatron.core.parallel_state.destroy_model_parallel()."
        )


def _sizes(layout: Layout) -> dict[str, Any]:
    """The sizes under Megatron-Core's names and in its form: a single stage has no virtual stages."""
    whole = {} if layout.pp > 1 else {"vp": None}
    return {name: getattr(replace(layout, **whole), short) for short, name in SIZE_FIELDS.items()}


def destroy_model_parallel() -> None:
    """Destroy the groups, so that the same processes can use another layout."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    global _initialized
    _initialized = None
    if parallel_state.model_parallel_is_initialized():
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        # Megatron-Core forgets its groups, but torch doesn't. Each gloo group keeps three threads, which poll every 10
        # ms.
        # torch's cache of sharded operations keeps meshes, and gives the tensors of the next model an equal
        # mesh that it already has: their groups stay.
        kept = set()
        for mesh in gc.get_referrers(DeviceMesh):  # each refers to its class; twice as fast as a look at all objects
            if type(mesh) is DeviceMesh:
                with contextlib.suppress(RuntimeError):  # one of its groups is destroyed
                    kept |= {group.group_name for group in mesh.get_all_groups()}
        for group in groups:
            if isinstance(group, torch.distributed.ProcessGroup) and group.group_name not in kept:
                with contextlib.suppress(ValueError):  # already destroyed
                    torch.distributed.destroy_process_group(group)
        # Caches of the last 32 embeddings, and the groups in them.
        for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
            cast(Any, embedding.forward).cache_clear()
    unset_num_microbatches_calculator()


def collective_timeout() -> timedelta:
    """The longest time of a collective: the variable TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, as in NeMo, else torch's 30
    minutes."""
    seconds = os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    return timedelta(seconds=int(seconds)) if seconds else timedelta(minutes=30)


def run_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", DEFAULT_SEED))


def seed_random_streams(seed: int, *, te_rng_tracker: bool = False, for_graphs: bool = False) -> None:
    """Seed Python, NumPy and torch, and Megatron-Core's streams.

    The streams are equal over data-parallel replicas and differ between pipeline stages. Inside layers with sharded
    tensors they also differ between tensor-parallel ranks. ``for_graphs`` selects streams whose state a captured CUDA
    graph can advance.
    """
    import random

    import numpy as np

    # As in Megatron-LM (training/initialize.py _set_random_seed): stages draw different initial weights.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=te_rng_tracker,
        use_cudagraphable_rng=for_graphs,
        # Otherwise the first kind created in a process would stay.
        force_reset_rng=for_graphs,
    )
