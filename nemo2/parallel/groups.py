# SPDX-License-Identifier: Apache-2.0
"""Process groups and random streams of the parallel layout, made by Megatron-Core."""

import contextlib
import gc
from dataclasses import replace
from datetime import timedelta
from typing import Any, Optional, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch.distributed.device_mesh import DeviceMesh

from nemo2.errors import ConfigError
from nemo2.parallel.layout import SIZE_FIELDS, Layout

_made: Optional[tuple[Any, dict[str, Any]]] = None
"""A group of those that were made here, and Megatron-Core's arguments for them. None: there are none."""


def initialize_model_parallel(layout: Layout, *, timeout: Optional[timedelta] = None, **options: Any) -> None:
    """Cut the world into Megatron-Core's groups. Groups that were made here with the same arguments stay; those made with others
    are taken down before. Groups that somebody else has made are used.

    Args:
        layout: Checked against the world before any group is made.
        timeout: How long a collective may take. None: Megatron-Core's 30 minutes.
        options: Further arguments of Megatron-Core's ``initialize_model_parallel``.

    Raises:
        ConfigError: the layout can't be laid over the world; groups that somebody else has made are of another layout.
    """
    global _made
    layout.data_parallel_size(torch.distributed.get_world_size())
    if timeout is not None:
        options["distributed_timeout_minutes"] = max(1, round(timeout.total_seconds() / 60))
    arguments = _sizes(layout) | options
    if parallel_state.model_parallel_is_initialized():
        if _made is None or _made[0] is not parallel_state.get_tensor_model_parallel_group():
            use_given_groups(layout)
            return
        if _made[1] == arguments:
            return
        destroy_model_parallel()
    parallel_state.initialize_model_parallel(**arguments)
    _made = parallel_state.get_tensor_model_parallel_group(), arguments


def use_given_groups(layout: Layout) -> None:
    """Accept groups that somebody else has made.

    Raises:
        ConfigError: there are none, or they are of another layout.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "strategy.init_model_parallel=False: nobody has made Megatron-Core's groups. Call "
            "megatron.core.parallel_state.initialize_model_parallel before the trainer runs, or leave init_model_parallel True."
        )
    there = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    asked = _sizes(layout) | {"expert_tensor_parallel_size": layout.expert_tensor_size}
    if problems := [
        f"strategy.{name}={asked[name]}, and Megatron-Core's groups, which are there already, have {name}={size}"
        for name, size in there.items()
        if (asked[name] or 1) != (size or 1)
    ]:
        raise ConfigError(
            f"{'; '.join(problems)}. Give the strategy the layout of the groups, or take them down with "
            "megatron.core.parallel_state.destroy_model_parallel."
        )


def _sizes(layout: Layout) -> dict[str, Any]:
    """Under Megatron-Core's names, as it takes them: a single stage has no virtual ones."""
    whole = {} if layout.pp > 1 else {"vp": None}
    return {name: getattr(replace(layout, **whole), short) for short, name in SIZE_FIELDS.items()}


def destroy_model_parallel() -> None:
    """Take the groups down, so that another layout can be laid in the same processes."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    global _made
    _made = None
    if parallel_state.model_parallel_is_initialized():
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        # Megatron-Core forgets its groups, torch doesn't: each of gloo's keeps three threads, which look every 10 ms for what
        # came.
        kept = _names_in_meshes()
        for group in groups:
            if isinstance(group, torch.distributed.ProcessGroup) and group.group_name not in kept:
                with contextlib.suppress(ValueError):  # taken down by somebody else
                    torch.distributed.destroy_process_group(group)
        for embedding in (
            RotaryEmbedding,
            YarnRotaryEmbedding,
        ):  # caches of the last 32 embeddings, and the groups in them
            cast(Any, embedding.forward).cache_clear()
    unset_num_microbatches_calculator()


def _names_in_meshes() -> set[str]:
    """Groups that a device mesh refers to. torch's cache of sharded operations keeps meshes, and gives the next model's tensors
    an equal one that it has met before."""
    names = set()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            with contextlib.suppress(RuntimeError):  # one of its groups is gone
                names |= {group.group_name for group in mesh.get_all_groups()}
    return names


def seed_random_streams(seed: int, *, te_rng_tracker: bool = False, for_graphs: bool = False) -> None:
    """Seed python, numpy and torch, and Megatron-Core's streams: the same over data-parallel replicas, different between
    pipeline stages, and inside layers different between tensor-parallel ranks where tensors are sharded.

    ``for_graphs``: of a kind whose state a captured CUDA graph can advance.
    """
    import random

    import numpy as np

    # As Megatron-LM does it (training/initialize.py _set_random_seed): stages draw different initial weights.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=te_rng_tracker,
        use_cudagraphable_rng=for_graphs,
        # The first kind that is made in a process stays otherwise.
        force_reset_rng=for_graphs,
    )
