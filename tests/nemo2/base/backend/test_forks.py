# SPDX-License-Identifier: Apache-2.0
"""Processes that a rank forks, such as Megatron-Core's checkpoint writers, beside process groups that are garbage."""

import gc
import os
import signal
import time
from typing import Any

import torch


def fork_beside_a_dead_group() -> int:
    """The exit code of a forked process that collects its garbage; -SIGKILL if it never ends."""
    from nemo2.base.backend import get_backend

    get_backend().install()
    gc.disable()
    holder: dict[str, Any] = {"group": torch.distributed.new_group(list(range(torch.distributed.get_world_size())))}
    backend = holder["group"]._get_backend(torch.device("cpu"))
    holder["itself"] = holder  # garbage that only the collector finds
    torch.distributed.all_reduce(torch.ones(1), group=holder["group"])
    torch.distributed.destroy_process_group(holder["group"])
    holder["backend"] = backend
    del holder, backend
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_does_not_destroy_groups_of_its_parent(run_on_ranks: Any) -> None:
    assert run_on_ranks(fork_beside_a_dead_group, 2) == [0, 0]
