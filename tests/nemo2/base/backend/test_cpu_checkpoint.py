# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed checkpoints on CPU: model and distributed optimizer, saved in one layout, resumed in another."""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_for_end

STEPS_BEFORE, STEPS_AFTER = 2, 2


def train_and_save(folder: str, layout: dict[str, Any], *, asynchronous: bool = False) -> list[float]:
    """Losses of the steps after the save, by a run that was not interrupted."""
    loop = _Loop(layout)
    loop.steps(0, STEPS_BEFORE)
    loop.save(folder, asynchronous=asynchronous)
    return loop.steps(STEPS_BEFORE, STEPS_AFTER)


def load_and_train(folder: str, layout: dict[str, Any]) -> list[float]:
    """The same losses by a new process that starts from the checkpoint."""
    loop = _Loop(layout | {"seed": 99})  # other initial weights, all of which must be overwritten
    loop.load(folder)
    return loop.steps(STEPS_BEFORE, STEPS_AFTER)


class _Loop:
    def __init__(self, layout: dict[str, Any]):
        import functools

        from support import bare_megatron as bare

        self.bare = bare
        self.settings = bare.Settings(use_distributed_optimizer=True, calculate_per_token_loss=True, **layout)
        bare.start_parallel(self.settings)
        self.chunks = bare.build_chunks(self.settings, functools.partial(bare.build_gpt, self.settings))
        self.model = bare.wrap(self.settings, self.chunks)
        self.optimizer = bare.build_optimizer(self.settings, self.model)
        bare.connect(self.settings, self.model[0].config, self.model, self.optimizer)
        self.batches = bare.random_batches(bare.Settings())

    def steps(self, first: int, number: int) -> list[float]:
        losses = []
        for step in range(first, first + number):
            losses.append(
                self.bare.forward_backward(self.settings, self.model, self.optimizer, self.batches(step)).item()
            )
            self.optimizer.step()
        return losses

    def state(self, *, loading: bool) -> dict[str, Any]:
        model = self.bare.weights(self.chunks)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return model | {"optimizer": optimizer}

    def save(self, folder: str, *, asynchronous: bool) -> None:
        import torch
        from megatron.core import dist_checkpointing

        if torch.distributed.get_rank() == 0:
            Path(folder).mkdir(parents=True)
        torch.distributed.barrier()
        if not asynchronous:
            dist_checkpointing.save(self.state(loading=False), folder)
            return
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        queue = AsyncCallsQueue(persistent=False)
        # The other strategy of 0.19 needs nvidia-resiliency-ext.
        strategies = inspect.signature(dist_checkpointing.save).parameters.keys() & {"async_strategy"}
        arguments: dict[str, Any] = {"async_sharded_save": True} | dict.fromkeys(strategies, "mcore")
        request: Any = dist_checkpointing.save(self.state(loading=False), folder, **arguments)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()

    def load(self, folder: str) -> None:
        import torch
        from megatron.core import dist_checkpointing

        with torch.no_grad():
            state: Any = dist_checkpointing.load(self.state(loading=True), folder)
        self.chunks[0].load_state_dict(state["model0"])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize(
    ("world", "layout", "new_world", "new_layout", "asynchronous"),
    [
        (2, {}, 2, {}, False),
        (2, {}, 2, {}, True),
        (2, {}, 1, {}, False),
        (1, {}, 2, {"tp": 2, "sequence_parallel": True}, False),
    ],
    ids=["dp2", "dp2 in the background", "dp2 to one", "one to tp2 sp"],
)
def test_a_resumed_run_continues_as_if_uninterrupted(
    run_on_ranks, tmp_path, world, layout, new_world, new_layout, asynchronous
):
    folder = str(tmp_path / "checkpoint")
    expected = run_on_ranks(train_and_save, world, folder, layout, asynchronous=asynchronous)[0]
    resumed = run_on_ranks(load_and_train, new_world, folder, new_layout)[0]
    if (world, layout) == (new_world, new_layout):
        assert resumed == expected
    else:
        assert resumed == pytest.approx(expected, rel=1e-6)


def server_of_the_queue() -> int:
    import multiprocessing

    from nemo2.base.backend import get_backend

    get_backend().install()
    from nemo2.base.backend.results_queue import results_queue

    queue = results_queue()
    assert results_queue() is queue
    queue.put("written")
    assert queue.get_nowait() == "written"
    return multiprocessing.active_children()[0].pid or 0


def test_the_process_behind_the_writers_queue_ends_with_its_rank(run_on_ranks):
    # The rank leaves by os._exit, so nothing but the server itself could have ended it. Its group is killed as well,
    # hence a new session.
    pid = run_on_ranks(in_own_session, 1, init_process_group=False)[0]
    wait_for_end(pid)


def in_own_session() -> int:
    """Report from a grandchild that dies without a goodbye, out of reach of whoever ends the rank's process group."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.write(writer, str(server_of_the_queue()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reader, 32))
