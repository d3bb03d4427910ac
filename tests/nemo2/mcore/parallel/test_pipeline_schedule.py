# SPDX-License-Identifier: Apache-2.0
"""The pipeline's timeline against Megatron-Core's schedules, really run on gloo ranks, and against published formulas."""

from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.pipeline_schedule import Schedule, rank_order, timeline

FORWARD, BACKWARD = 1.0, 2.0
RUN = {
    "1F1B on two stages": Schedule(pp=2, num_microbatches=5),
    "1F1B on four stages": Schedule(pp=4, num_microbatches=6),
    "fewer micro-batches than stages": Schedule(pp=4, num_microbatches=2),
    "interleaved": Schedule(pp=4, num_microbatches=8, vp=2),
    "interleaved, three chunks": Schedule(pp=2, num_microbatches=4, vp=3),
    "interleaved in groups that don't divide": Schedule(pp=2, num_microbatches=5, vp=2, group_size=3),
    "interleaved, all in the warm-up": Schedule(pp=4, num_microbatches=4, vp=2),
    "no pipeline": Schedule(pp=1, num_microbatches=3),
}


class _Clock(torch.autograd.Function):
    """A pass that computes nothing but the time at which it ends; tensors carry that time to the next stage."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, received: torch.Tensor | None, stub: "StubChunk", microbatch: int
    ) -> Any:
        ctx.stub, ctx.microbatch, ctx.has_input = stub, microbatch, received is not None
        end = stub.run(True, microbatch, float(received.max()) if received is not None else 0.0)
        return torch.full((1, 1, 1), end)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Behind the last stage comes the loss, whose gradient is no time.
        end = ctx.stub.run(False, ctx.microbatch, 0.0 if ctx.stub.last else float(gradients[0].max()))
        return torch.zeros(1), (torch.full((1, 1, 1), end) if ctx.has_input else None), None, None


class StubChunk(torch.nn.Module):
    """A model chunk with a clock that it shares with the other chunks of its rank."""

    def __init__(self, config: Any, shared: dict[str, Any], chunk: int, last: bool) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.shared, self.chunk, self.last = shared, chunk, last
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.received = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, microbatch: int) -> torch.Tensor:
        return _Clock.apply(self.weight, self.received, self, microbatch)  # pyright: ignore[reportReturnType]

    def run(self, forward: bool, microbatch: int, ready: float) -> float:
        start = max(self.shared["now"], ready)
        self.shared["now"] = start + (FORWARD if forward else BACKWARD) / self.shared["chunks"]
        self.shared["slots"].append((forward, self.chunk, microbatch, start, self.shared["now"]))
        return self.shared["now"]


def run_for_real(schedules: dict[str, Schedule]) -> dict[str, list[tuple]]:
    """The passes of this rank and their times, by Megatron-Core's own schedule function and messages over gloo."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo2.base.backend import get_backend
    from nemo2.mcore.parallel.groups import destroy_model_parallel, initialize_model_parallel
    from nemo2.mcore.parallel.layout import Layout

    get_backend().install()
    found = {}
    for name, schedule in schedules.items():
        initialize_model_parallel(Layout(pp=schedule.pp, vp=schedule.vp))
        rank = parallel_state.get_pipeline_model_parallel_rank()
        config = TransformerConfig(
            num_layers=schedule.pp * schedule.chunks,
            hidden_size=1,
            num_attention_heads=1,
            pipeline_model_parallel_size=schedule.pp,
            virtual_pipeline_model_parallel_size=schedule.vp if schedule.interleaved else None,
            microbatch_group_size_per_vp_stage=schedule.group,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=schedule.interleaved,
            batch_p2p_comm=not schedule.interleaved,
            deallocate_pipeline_outputs=False,
        )
        shared: dict[str, Any] = {"now": 0.0, "slots": [], "chunks": schedule.chunks}
        chunks = [
            StubChunk(config, shared, index, rank == schedule.pp - 1 and index == schedule.chunks - 1)
            for index in range(schedule.chunks)
        ]

        def step(iterator: Any, chunk: StubChunk) -> Any:
            return chunk(next(iterator)), lambda output: (output.sum(), {})

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(schedule.num_microbatches)) for _ in chunks],
            model=chunks,
            num_microbatches=schedule.num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        found[name] = (rank, shared["slots"])
        destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def really_run(run_on_ranks):
    return run_on_ranks(run_for_real, 4, RUN)


@pytest.mark.quick
@pytest.mark.parametrize("name", RUN)
def test_the_timeline_is_what_megatron_core_does_on_real_ranks(name, really_run):
    expected = timeline(RUN[name], forward=FORWARD, backward=BACKWARD)
    seen = set()
    for answers in really_run:
        rank, slots = answers[name]
        seen.add(rank)
        drawn = [(s.work.forward, s.work.chunk, s.work.microbatch, s.start, s.end) for s in expected.slots[rank]]
        assert [slot[:3] for slot in slots] == [slot[:3] for slot in drawn]
        # The times travelled as float32.
        assert [slot[3:] for slot in slots] == [pytest.approx(slot[3:], abs=1e-5) for slot in drawn]
    assert seen == set(range(RUN[name].pp))


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (4, 64), (8, 32)])
def test_the_bubble_of_1f1b_is_that_of_the_papers(pp, count):
    """(p - 1) / m of the work's own time: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1."""
    played = timeline(Schedule(pp=pp, num_microbatches=count))
    assert played.bubble_overhead == pytest.approx((pp - 1) / count)
    assert timeline(Schedule(pp=pp, num_microbatches=count, all_forward_first=True)).span == pytest.approx(played.span)


@pytest.mark.parametrize(("pp", "count", "vp"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 32, 3)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(pp, count, vp):
    """(p - 1) / (v m): the same paper, section 2.2.2."""
    played = timeline(Schedule(pp=pp, num_microbatches=count, vp=vp))
    assert played.bubble_overhead == pytest.approx((pp - 1) / (vp * count))


def test_1f1b_holds_as_many_activations_as_stages_lie_ahead_and_gpipe_holds_all():
    played = timeline(Schedule(pp=4, num_microbatches=8))
    assert [played.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    gpipe = timeline(Schedule(pp=4, num_microbatches=8, all_forward_first=True))
    assert [gpipe.in_flight(rank) for rank in range(4)] == [8] * 4


def test_phases_are_warm_up_then_steady_then_drain_and_every_pass_happens_once():
    schedule = Schedule(pp=4, num_microbatches=8, vp=2)
    for rank in range(4):
        order = rank_order(schedule, rank)
        phases = [work.phase for work in order]
        assert phases == sorted(phases, key=["warm-up", "steady", "drain"].index)
        assert all(work.forward for work in order if work.phase == "warm-up")
        assert not any(work.forward for work in order if work.phase == "drain")
        assert len({(work.forward, work.chunk, work.microbatch) for work in order}) == len(order) == 2 * 2 * 8


def test_a_heavier_stage_is_what_everyone_waits_for():
    even = timeline(Schedule(pp=2, num_microbatches=8))
    uneven = timeline(Schedule(pp=2, num_microbatches=8), weights=[[1], [3]])
    assert uneven.busy(0) == pytest.approx(even.busy(0) / 2) and uneven.busy(1) == pytest.approx(even.busy(1) * 1.5)
    assert uneven.span > even.span and uneven.bubble_fraction > even.bubble_fraction


def test_transfers_lengthen_the_bubble_and_not_the_work():
    plain, slow = (timeline(Schedule(pp=4, num_microbatches=8), transfer=transfer) for transfer in (0.0, 0.25))
    assert slow.span >= plain.span + 6 * 0.25 and slow.busy(0) == plain.busy(0)


@pytest.mark.parametrize("schedule", [Schedule(pp=4, num_microbatches=8), Schedule(pp=2, num_microbatches=4, vp=2)])
def test_a_sender_that_waits_is_busy_until_its_message_is_there(schedule):
    free, waits = (timeline(schedule, transfer=0.25, sender_waits=waits) for waits in (False, True))
    last = schedule.pp * schedule.chunks - 1
    held = []
    for stage, row in enumerate(waits.slots):
        for one, after in zip(row, row[1:], strict=False):
            sends = one.work.chunk * schedule.pp + stage != (last if one.work.forward else 0)
            assert after.start >= one.end + 0.25 * sends
            held.append(sends)
    assert any(held) and not all(held) and waits.span > free.span and waits.busy(0) == free.busy(0)
    assert timeline(schedule, sender_waits=True) == timeline(schedule)


def test_one_more_forward_before_the_first_backward_hides_the_experts_exchanges():
    plain = Schedule(pp=4, num_microbatches=8, vp=2)
    hiding = Schedule(pp=4, num_microbatches=8, vp=2, overlap_moe_expert_parallel_comm=True)
    count = [sum(work.phase == "warm-up" for work in rank_order(one, 0)) for one in (plain, hiding)]
    assert count[1] == count[0] + 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_microbatches": 2, "vp": 2}, "must lie between the pipeline size 4 and the number of micro-batches 2"),
        ({"num_microbatches": 2, "vp": 2}, "micro-batches 2: use at least 4 micro-batches, or use no virtual stages"),
        (
            {"num_microbatches": 8, "vp": 2, "group_size": 3},
            "micro-batches 8: set it to at least 4, or use no virtual stages",
        ),
        ({"num_microbatches": 6, "vp": 2}, "leave 2 after groups of 4, fewer than the 4 pipeline stages. Use 4 or 8"),
        ({"num_microbatches": 8, "vp": 2, "group_size": 3}, "group_size_per_vp_stage=3 must lie between"),
        ({"num_microbatches": 0}, "must both be at least 1"),
    ],
)
def test_what_megatron_core_refuses_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(pp=4, **sizes)


@pytest.mark.parametrize("weights", [[[1], [0]], [[1, 1], [1, 1]], [[-1], [2]]])
def test_weights_must_fit_the_chunks(weights):
    if weights == [[1], [0]]:
        assert timeline(Schedule(pp=2, num_microbatches=2), weights=weights).busy(1) == 0
        return
    with pytest.raises(ConfigError, match="weights"):
        timeline(Schedule(pp=2, num_microbatches=2), weights=weights)
