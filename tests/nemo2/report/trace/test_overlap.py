# SPDX-License-Identifier: Apache-2.0
"""Overlap as it happens on gloo ranks: when collectives are issued and done against when layers run."""

import math
import time
from typing import Any

import lightning.pytorch as pl
import pytest

from support import small_runs

STEPS = 3
BUCKET = 8000
DP = {
    "on": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": BUCKET},
    "on, one bucket": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10**9},
    "off": {"overlap_grad_reduce": False, "overlap_param_gather": False, "bucket_size": BUCKET},
}
PP = {"interleaved": 2, "1F1B": None}


class Watch(pl.Callback):
    """Records the last step: communication, and when each layer's passes start and end."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int, int, int]] = []
        self.found: list[dict[str, Any]] = []
        self.sizes: list[list[int]] = []
        self._started: dict[tuple[str, int], int] = {}
        self._recorder: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for chunk, core in zip(
            trainer.strategy.megatron_parallel, trainer.strategy.megatron_parallel.unwrapped, strict=True
        ):
            self.sizes.append([parameter.numel() for parameter in core.parameters()])
            del chunk
            for module in core.modules():
                if hasattr(module, "layer_number") and hasattr(module, "self_attention"):
                    self._watch(module, module.layer_number - 1)

    def _watch(self, module: Any, layer: int) -> None:
        def begin(kind: str) -> Any:
            return lambda *_: self._started.__setitem__((kind, layer), time.time_ns())

        def end(kind: str) -> Any:
            return lambda *_: self.passes.append((kind, layer, self._started[kind, layer], time.time_ns()))

        module.register_forward_pre_hook(begin("forward"))
        module.register_forward_hook(end("forward"))
        module.register_full_backward_pre_hook(begin("backward"))
        module.register_full_backward_hook(end("backward"))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        from nemo2.report.trace.recorder import CommunicationRecorder

        if batch_idx == STEPS - 1:
            self.passes.clear()
            self._recorder = CommunicationRecorder()
            self._recorder.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self.found = [vars(one) | {"kind": one.kind} for one in self._recorder.communications]
            self._recorder = None


def run(**options: Any) -> dict[str, Any]:
    watch = Watch()
    model = small_runs.build_llama(
        distributed=options.pop("distributed", False), num_layers=4, **options.pop("model", {})
    )
    record = small_runs.fit(model, max_steps=STEPS, callbacks=[watch], **options)
    small_runs.release()
    return {"losses": record["losses"], "passes": watch.passes, "found": watch.found, "sizes": watch.sizes}


def run_all() -> dict[str, dict[str, Any]]:
    from megatron.core.distributed import DistributedDataParallelConfig

    found = {}
    for name, settings in DP.items():
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, **settings)
        found[name] = run(ddp=ddp, distributed=True)
    for name, vp in PP.items():
        found[name] = run(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=vp)
    return found | {"ring": run_ring()}


def run_ring() -> dict[str, Any]:
    """Two context-parallel ranks; beside what `run` gives, when each product of queries and keys begins."""
    from nemo2.models.layers import ring

    begins: list[int] = []
    scores_of = ring.scores_of

    def noted(*args: Any) -> Any:
        begins.append(time.time_ns())
        return scores_of(*args)

    ring.scores_of = noted
    try:
        found = run(context_parallel_size=2, model={"cp_comm_type": "p2p"})
    finally:
        ring.scores_of = scores_of
    return found | {"attends": begins}


@pytest.fixture(scope="module")
def ranks(run_on_ranks) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(run_all, 2)


def named(case: dict[str, Any], *parts: str) -> list[dict[str, Any]]:
    return [one for one in case["found"] if one["kind"] == "dp" and any(part in one["name"] for part in parts)]


def edge(case: dict[str, Any], kind: str, layer: int, which: int, *, last: bool = True) -> int:
    """When a layer's last (or first) pass of a kind starts (2) or ends (3)."""
    times = [one[which] for one in case["passes"] if one[0] == kind and one[1] == layer]
    return max(times) if last else min(times)


def test_losses_are_the_same_on_and_off(ranks):
    for case in ranks:
        assert case["on"]["losses"] == case["on, one bucket"]["losses"] == case["off"]["losses"]
        assert len(set(case["on"]["losses"])) == STEPS


def test_gradients_of_the_last_layers_travel_while_the_first_layers_go_backward(ranks):
    for case in ranks:
        reduced = named(case["on"], "reduce_scatter")
        backward_ends = edge(case["on"], "backward", 0, 3)
        assert min(one["issued"] for one in reduced) < backward_ends
        # Not before the last layer has gone backward through the last micro-batch.
        assert min(one["issued"] for one in reduced) > edge(case["on"], "backward", 3, 2)


def test_without_overlap_gradients_travel_after_the_last_backward(ranks):
    for case in ranks:
        reduced = named(case["off"], "reduce_scatter")
        assert reduced and min(one["issued"] for one in reduced) > edge(case["off"], "backward", 0, 3)


def test_parameters_are_gathered_before_the_forward_of_their_layer_and_beside_that_of_earlier_ones(ranks):
    for case in ranks:
        gathered = named(case["on"], "all_gather")
        first, last = (edge(case["on"], "forward", layer, 2, last=False) for layer in (0, 3))
        during = [one for one in gathered if first < one["issued"] < last]
        assert during, "no gather was issued while earlier layers ran"
        # Everything a forward pass needs was under way before its last layer began.
        forward_ends = edge(case["on"], "forward", 3, 3, last=False)
        assert not [one for one in gathered if last < one["issued"] < forward_ends]


def test_without_overlap_no_parameters_are_gathered_while_layers_run(ranks):
    for case in ranks:
        gathered = named(case["off"], "all_gather")
        begin, end = edge(case["off"], "forward", 0, 2, last=False), edge(case["off"], "backward", 0, 3)
        assert gathered and not [one for one in gathered if begin < one["issued"] < end]


@pytest.mark.parametrize("name", ["on", "on, one bucket"])
def test_the_bucket_size_gives_the_number_of_reductions(name, ranks):
    """A bucket takes parameters from the last to the first and is closed once it holds at least its size."""
    for case in ranks:
        (sizes,) = case[name]["sizes"]
        buckets, held = 0, 0
        for size in reversed(sizes):
            # Parameters start at multiples of 64 elements in a distributed optimizer's buffer.
            held = -(-held // 64) * 64 + size
            if held >= DP[name]["bucket_size"]:
                buckets, held = buckets + 1, 0
        assert len(named(case[name], "reduce_scatter")) == buckets + bool(held)
    assert len(named(ranks[0]["on"], "reduce_scatter")) > 2


def in_flight_during_compute(case: dict[str, Any]) -> int:
    """Messages between whose sending and whose completion a layer begins to run."""
    begins = [one[2] for one in case["passes"]]
    sends = [one for one in case["found"] if one["kind"] == "pp" and one["name"] == "send"]
    assert sends
    # Nobody waits for the last ones: they are under way until the step ends.
    return sum(any(one["returned"] < begin < (one["done"] or math.inf) for begin in begins) for one in sends)


def test_interleaved_stages_compute_while_their_messages_are_under_way_and_1f1b_ones_wait(ranks):
    for case in ranks:
        assert in_flight_during_compute(case["interleaved"]) > 0
        assert in_flight_during_compute(case["1F1B"]) == 0
        assert case["interleaved"]["losses"] != [] and len(case["1F1B"]["losses"]) == STEPS


def test_keys_and_values_go_round_the_ring_while_a_rank_attends(ranks):
    for case in (case["ring"] for case in ranks):
        sends = [one for one in case["found"] if one["kind"] == "cp" and one["name"] == "send"]
        passes = [one for one in case["passes"] if one[0] == "forward"]
        # Each of two ranks sends its keys and values once forward and once backward, and gradients of both twice.
        assert len(sends) == 8 * len(passes)
        beside = [any(one["returned"] < begin < one["done"] for begin in case["attends"]) for one in sends]
        assert sum(beside) == 4 * len(passes), "gradients are waited for: there is nothing to add to them before"
        assert len(set(case["losses"])) == STEPS
