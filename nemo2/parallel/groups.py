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

from nemo2.parallel.layout import SIZE_FIELDS, Layout


def initialize_model_parallel(layout: Layout, *, timeout: Optional[timedelta] = None, **options: Any) -> None:
    """Cut the world into Megatron-Core's groups. Does nothing if that has been done.

    Args:
        layout: Checked against the world before any group is made.
        timeout: How long a collective may take. None: Megatron-Core's 30 minutes.
        options: Further arguments of Megatron-Core's ``initialize_model_parallel``.

    Raises:
        ConfigError: the layout can't be laid over the world.
    """
    if parallel_state.model_parallel_is_initialized():
        return
    layout.data_parallel_size(torch.distributed.get_world_size())
    whole = {} if layout.pp > 1 else {"vp": None}  # one stage has no virtual ones
    if timeout is not None:
        options["distributed_timeout_minutes"] = max(1, round(timeout.total_seconds() / 60))
    parallel_state.initialize_model_parallel(
        **{name: getattr(replace(layout, **whole), short) for short, name in SIZE_FIELDS.items()},
        **options,
    )


def destroy_model_parallel() -> None:
    """Take the groups down, so that another layout can be laid in the same processes."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

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
