# SPDX-License-Identifier: Apache-2.0
"""The schedules against points worked out by hand and against expressions written from the papers."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.mcore.optim import lr_scheduler
from nemo2.mcore.optim.lr_scheduler import (
    LR_FACTOR,
    CosineAnnealingScheduler,
    InverseSquareRootAnnealingScheduler,
    LRSchedule,
    LRSchedulerModule,
    NoamAnnealingScheduler,
    NoamHoldAnnealingScheduler,
    PolynomialDecayAnnealingScheduler,
    PolynomialHoldDecayAnnealingScheduler,
    SquareAnnealingScheduler,
    SquareRootAnnealingScheduler,
    T5InverseSquareRootAnnealingScheduler,
    WarmupAnnealingScheduler,
    WarmupHoldAnnealScheduler,
    WarmupHoldPolicyScheduler,
    WarmupPolicyScheduler,
)

PEAK = 1e-2
WARMUP, STEPS, FLOOR = 4, 20, 1e-3


def make(cls, **kwargs):
    return cls(**{"max_steps": STEPS, "min_lr": FLOOR, **kwargs})


# step -> rate, by hand; (PEAK, WARMUP, STEPS, FLOOR) as above
BY_HAND = [
    (
        make(CosineAnnealingScheduler, warmup_steps=WARMUP, constant_steps=0),
        {0: 2e-3, 3: 8e-3, 4: 1e-2, 12: 5.5e-3, 20: 1e-3, 21: 1e-3},
    ),
    (
        make(CosineAnnealingScheduler, warmup_steps=WARMUP, constant_steps=6),
        {0: 0.0, 1: 2.5e-3, 4: 1e-2, 9: 5.5e-3, 14: 1e-3, 17: 1e-3, 30: 1e-3},
    ),
    (make(CosineAnnealingScheduler, warmup_steps=WARMUP, constant_steps=80000), {2: 5e-3, 4: 1e-2, 5: 1e-3}),
    (make(WarmupPolicyScheduler, warmup_steps=WARMUP), {0: 2e-3, 4: 1e-2, 5: 1e-2, 20: 1e-2, 21: 1e-3}),
    (make(WarmupPolicyScheduler, warmup_ratio=0.2), {0: 2e-3, 4: 1e-2, 20: 1e-2}),
    (make(WarmupAnnealingScheduler, warmup_steps=WARMUP), {0: 2e-3, 4: 1e-2, 12: 5.5e-3, 20: 1e-3, 25: 1e-3}),
    (
        make(WarmupHoldPolicyScheduler, warmup_steps=WARMUP, hold_steps=6),
        {0: 2e-3, 5: 1e-2, 9: 1e-2, 15: 1e-2, 21: 1e-3},
    ),
    (
        make(WarmupHoldAnnealScheduler, warmup_ratio=0.2, hold_ratio=0.4),
        {0: 2e-3, 4: 1e-2, 11: 1e-2, 12: 1e-2, 16: 5.5e-3, 20: 1e-3},
    ),
    (
        make(WarmupHoldAnnealScheduler, warmup_ratio=0.2, hold_ratio=0.4, decay_schedule="one_minus_square_root"),
        {4: 1e-2, 11: 1e-2, 14: 5e-3, 20: 1e-3, 21: 1e-3},
    ),
    # without a hold the decay's formula counts from step 0, so the rate jumps after the warm-up
    (make(WarmupHoldAnnealScheduler, warmup_ratio=0.2), {4: 1e-2, 5: 7.75e-3, 12: 4.6e-3}),
    (make(SquareAnnealingScheduler), {0: 1e-2, 10: 2.5e-3, 18: 1e-3, 20: 1e-3}),
    (make(SquareRootAnnealingScheduler), {0: 1e-2, 15: 5e-3, 20: 1e-3}),
    (make(InverseSquareRootAnnealingScheduler), {0: 1e-2, 3: 5e-3, 8: 1e-2 / 3, 21: 1e-3}),
    (make(T5InverseSquareRootAnnealingScheduler, constant_steps=9), {0: 1 / 3, 9: 1 / 3, 16: 0.25, 21: 1e-3}),
    (
        make(NoamAnnealingScheduler, d_model=4, warmup_steps=WARMUP),
        {0: 6.25e-4, 1: 6.25e-4, 4: 2.5e-3, 16: 1.25e-3, 400: 1e-3},
    ),
    (
        make(NoamHoldAnnealingScheduler, warmup_steps=WARMUP, hold_steps=5),
        {0: 2e-3, 8: 1e-2, 9: 1e-2, 14: 1e-2 * 2 / 3, 21: 1e-3},
    ),
    (make(PolynomialDecayAnnealingScheduler, power=2.0), {0: 1e-2, 10: 3.25e-3, 20: 1e-3, 21: 1e-3}),
    (make(PolynomialHoldDecayAnnealingScheduler, power=1.0, hold_steps=10), {0: 1e-2, 9: 1e-2, 15: 5.5e-3, 20: 1e-3}),
]


@pytest.mark.parametrize(("schedule", "points"), BY_HAND, ids=lambda value: type(value).__name__)
def test_the_rates_are_those_worked_out_by_hand(schedule, points):
    assert {step: schedule.lr_at(step, PEAK) for step in points} == pytest.approx(points, rel=1e-12)


def test_every_public_schedule_has_a_point_worked_out_by_hand():
    public = {
        cls
        for name, cls in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(cls, LRSchedule) and not inspect.isabstract(cls) and not name.startswith("_")
    }
    assert public == {type(schedule) for schedule, _ in BY_HAND}


def test_the_warm_up_of_a_ratio_counts_whole_steps_of_the_run():
    by_ratio = WarmupPolicyScheduler(warmup_ratio=0.13, max_steps=57)
    by_steps = WarmupPolicyScheduler(warmup_steps=math.floor(0.13 * 57), max_steps=57)
    assert [by_ratio.lr_at(s, 1.0) for s in range(60)] == [by_steps.lr_at(s, 1.0) for s in range(60)]


def test_cosine_without_constant_steps_equals_torch_after_the_warm_up():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - WARMUP, eta_min=FLOOR)
    schedule = make(CosineAnnealingScheduler, warmup_steps=WARMUP, constant_steps=0)
    for step in range(WARMUP, STEPS + 1):
        assert schedule.lr_at(step, PEAK) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


class Groups:
    """A Megatron-Core optimizer as a scheduler sees it: parameter groups, and no torch base class."""

    def __init__(self, *groups):
        self.param_groups = list(groups)


def test_groups_follow_their_own_peak_and_multiplier():
    optimizer = Groups(
        {"lr": 1e-2, "max_lr": 1e-2, "lr_mult": 1.0}, {"lr": 1e-2, "max_lr": 4e-2, "lr_mult": 0.5}, {"lr": 2e-2}
    )
    schedule = make(WarmupAnnealingScheduler, warmup_steps=WARMUP).scheduler(None, optimizer)
    for _ in range(12):
        schedule.step()
    expected = [5.5e-3, 0.5 * (1e-3 + 0.5 * 3.9e-2), 1e-3 + 0.5 * 1.9e-2]
    assert schedule.get_last_lr() == pytest.approx(expected)
    assert [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr()


@pytest.mark.parametrize("factor", [0.01, 0.0])
def test_a_group_that_its_module_scales_follows_the_others_times_its_factor(factor):
    optimizer = Groups({"lr": 1e-2}, {"lr": 1e-2 * factor, LR_FACTOR: factor})
    schedule = make(WarmupAnnealingScheduler, warmup_steps=WARMUP).scheduler(None, optimizer)
    for _ in range(40):
        plain, scaled = schedule.get_last_lr()
        assert scaled == pytest.approx(plain * factor)
        schedule.step()


@pytest.mark.parametrize("stop", [0, 3, 4, 11, 20, 23])
def test_a_restored_schedule_continues_exactly_from_the_rate_of_step_zero_on(stop):
    def fresh():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
        schedule = make(CosineAnnealingScheduler, warmup_steps=WARMUP, constant_steps=2).scheduler(None, optimizer)
        return optimizer, schedule

    def run(optimizer, schedule, steps):
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        return rates

    whole = run(*fresh(), 25)
    assert whole[:2] == pytest.approx([0.0, PEAK / WARMUP])
    optimizer, schedule = fresh()
    run(optimizer, schedule, stop)
    saved, saved_optimizer = schedule.state_dict(), optimizer.state_dict()
    optimizer, schedule = fresh()
    optimizer.load_state_dict(saved_optimizer)
    schedule.load_state_dict(saved)
    assert run(optimizer, schedule, 25 - stop) == whole[stop:]


def test_a_resumed_run_may_be_longer_than_the_first():
    short, longer = (
        WarmupAnnealingScheduler(warmup_steps=0, max_steps=steps).scheduler(None, Groups({"lr": PEAK}))
        for steps in (10, 20)
    )
    for _ in range(5):
        short.step()
    longer.load_state_dict(short.state_dict())
    assert longer.get_last_lr() == pytest.approx([PEAK * 15 / 20])


def test_max_steps_comes_from_the_trainer_unless_it_is_set():
    model = SimpleNamespace(trainer=SimpleNamespace(max_steps=40))
    module = WarmupAnnealingScheduler(warmup_steps=0)
    assert module.scheduler(model, Groups({"lr": 1.0})).schedule.lr_at(20, 1.0) == pytest.approx(0.5)
    assert module.max_steps is None  # the module itself is left as the recipe made it
    fixed = WarmupAnnealingScheduler(warmup_steps=0, max_steps=80)
    assert fixed.scheduler(model, Groups({"lr": 1.0})).schedule.lr_at(20, 1.0) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (CosineAnnealingScheduler(), "CosineAnnealingScheduler.max_steps is None .* Set trainer.max_steps"),
        (WarmupPolicyScheduler(warmup_ratio=0.1), "max_steps is None"),
        (
            make(CosineAnnealingScheduler, min_lr=0.1),
            "min_lr=0.1 is above the peak learning rate optim.config.lr=0.001",
        ),
    ],
)
def test_a_run_without_end_is_refused_only_where_the_formula_needs_one(schedule, words):
    model = SimpleNamespace(trainer=SimpleNamespace(max_steps=-1))
    with pytest.raises(ConfigError, match=words):
        schedule.scheduler(model, Groups({"lr": 1e-3}))
    endless = WarmupPolicyScheduler(warmup_steps=4).scheduler(model, Groups({"lr": 1e-3}))
    assert endless.schedule.lr_at(10**9, 1e-3) == 1e-3


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (CosineAnnealingScheduler(), "warmup_steps=750 and constant_steps=80000 leave none of the 1000 steps"),
        (CosineAnnealingScheduler(constant_steps=0, warmup_steps=2000), "the warm-up of 2000 steps does not end"),
        (WarmupAnnealingScheduler(warmup_ratio=1.0, min_lr=0), "the warm-up of 1000 steps does not end"),
        (CosineAnnealingScheduler(constant_steps=0), None),
        (CosineAnnealingScheduler(constant_steps=200), None),
        (WarmupAnnealingScheduler(warmup_ratio=0.2, min_lr=0), None),
    ],
)
def test_what_a_run_of_this_length_does_not_come_to_is_said(schedule, words, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(lr_scheduler, "rank_zero_info", lambda form, *values: said.append(form % values))
    model = SimpleNamespace(trainer=SimpleNamespace(max_steps=1000))
    schedule.scheduler(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK))
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


def test_lightning_gets_scheduler_interval_frequency_and_monitor():
    described = make(CosineAnnealingScheduler, interval="epoch", frequency=3, monitor="loss")(
        None, Groups({"lr": PEAK})
    )
    scheduler = described.pop("scheduler")
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert described == {"interval": "epoch", "frequency": 3, "monitor": "loss"}


def test_a_users_own_module_may_return_what_nemo_documents():
    class Mine(LRSchedulerModule):
        def scheduler(self, model, optimizer):
            made = torch.optim.lr_scheduler.ConstantLR(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "epoch"}, "monitor": "x"}

    described = Mine()(None, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK))
    assert isinstance(described.pop("scheduler"), torch.optim.lr_scheduler.ConstantLR)
    assert described == {"interval": "epoch", "frequency": 1, "monitor": "x"}


@pytest.mark.parametrize(
    ("cls", "kwargs", "words"),
    [
        (CosineAnnealingScheduler, {"min_lr": -1.0}, "min_lr=-1.0: must be at least 0"),
        (CosineAnnealingScheduler, {"warmup_steps": -1}, "warmup_steps=-1: must be a whole number"),
        (CosineAnnealingScheduler, {"warmup_stepz": 1}, "did you mean 'warmup_steps'"),
        (
            WarmupPolicyScheduler,
            {"warmup_ratio": 1.5},
            "warmup_ratio=1.5: must be at least 0 and at most 1 .a share of max_steps",
        ),
        (WarmupPolicyScheduler, {"warmup_ratio": 0.5, "warmup_steps": 10}, "both set the length of the warm-up"),
        (WarmupHoldPolicyScheduler, {"hold_ratio": 0.5, "hold_steps": 10}, "both set the length of the hold"),
        (WarmupHoldAnnealScheduler, {"decay_schedule": "cubic"}, "'linear' or 'one_minus_square_root'"),
        (WarmupPolicyScheduler, {"interval": "batch"}, "interval='batch': must be 'step' or 'epoch'"),
        (WarmupPolicyScheduler, {"frequency": 0}, "frequency=0"),
        (NoamHoldAnnealingScheduler, {"warmup_steps": 0}, "Set warmup_steps or warmup_ratio above 0"),
        (NoamAnnealingScheduler, {"d_model": 0}, "d_model=0"),
        (T5InverseSquareRootAnnealingScheduler, {"constant_steps": 0}, "constant_steps=0"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(cls, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        cls(**kwargs)
