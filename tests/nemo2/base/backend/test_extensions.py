# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core compiles in its first step is compiled before, and a killed process's lock stops nobody."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo2.base.backend.extensions import discards_outputs


def recomputes(*modules: str, granularity: str | None = "selective") -> Any:
    return SimpleNamespace(recompute_granularity=granularity, recompute_modules=list(modules))


@pytest.mark.parametrize(
    ("config", "discards"),
    [
        (recomputes("core_attn", "mlp"), False),
        (recomputes("mla_up_proj", "core_attn"), True),
        (recomputes("layernorm", granularity="full"), False),
        (recomputes(granularity=None), False),
    ],
)
def test_recomputation_that_keeps_its_outputs_needs_no_extension(config: Any, discards: bool):
    assert discards_outputs(config) is discards


def build_beside_a_lock(cache: str, seconds: float) -> list[bool]:
    """Whether a rank was locked out when it built, of two; the lock is as old as a killed process's."""
    import torch
    from megatron.core.tensor_parallel import random

    from nemo2.base.backend import extensions

    os.environ["TORCH_EXTENSIONS_DIR"] = cache
    from torch.utils.cpp_extension import _get_build_directory

    rank = torch.distributed.get_rank()
    lock = Path(_get_build_directory("share_storage_ext", False), "lock")
    if rank == 0:
        lock.touch()
        os.utime(lock, (time.time() - seconds, time.time() - seconds))
    torch.distributed.barrier()
    built: list[bool] = []
    random._get_share_storage = lambda: built.append(lock.exists())  # pyright: ignore[reportAttributeAccessIssue]
    extensions.build_extensions(recomputes("layernorm"), local_rank=rank)
    return built


def test_a_lock_that_a_killed_process_left_is_removed_before_any_rank_waits_for_it(run_on_ranks, tmp_path):
    assert run_on_ranks(build_beside_a_lock, 2, str(tmp_path), 3600.0) == [[False], [False]]


def test_a_lock_whose_time_is_ahead_of_this_hosts_stops_nobody_for_ever(tmp_path, monkeypatch):
    from nemo2.base.backend import extensions

    monkeypatch.setattr(extensions, "_STALE_SECONDS", 0.3)
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (time.time() + 3600.0, time.time() + 3600.0))
    extensions._remove_stale_lock(lock, "ext")
    assert not lock.exists()


def fail_to_build() -> str:
    from megatron.core.tensor_parallel import random

    from nemo2.base.backend import extensions
    from nemo2.base.errors import RuntimeFault

    def without_a_compiler() -> None:
        raise RuntimeError("no ninja")

    random._get_share_storage = without_a_compiler  # pyright: ignore[reportAttributeAccessIssue]
    try:
        extensions.build_extensions(recomputes("layernorm"), local_rank=0)
    except RuntimeFault as error:
        return str(error)
    return ""


def test_a_node_without_a_compiler_is_told_what_to_install_or_to_recompute(run_on_ranks):
    (message,) = run_on_ranks(fail_to_build, 1)
    assert "no ninja" in message and "recompute_modules" in message and "core_attn" in message
