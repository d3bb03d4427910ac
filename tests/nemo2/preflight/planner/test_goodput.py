# SPDX-License-Identifier: Apache-2.0
"""Interruptions and checkpoints, against a simulation of them and against Young's approximation."""

import math
import random

import pytest

from nemo2.base.errors import ConfigError
from nemo2.preflight.planner.goodput import Failures, best_interval, expected_hours, goodput


def simulated(hours: float, interval: float, between: float, save: float, restart: float, seed: int) -> float:
    """Hours in all of one run with failures at random, at any moment: of work, of a save, and of a restart."""
    draw = random.Random(seed)
    done = clock = 0.0
    while done < hours - 1e-9:
        piece = min(interval, hours - done) + save
        failure = draw.expovariate(1 / between)
        if failure >= piece:
            clock, done = clock + piece, done + piece - save
            continue
        clock += failure
        while (failure := draw.expovariate(1 / between)) < restart:
            clock += failure
        clock += restart
    return clock


def test_the_expected_time_is_what_a_simulation_takes() -> None:
    case = {"interval": 2.0, "between": 10.0, "save": 0.25, "restart": 0.5}
    mean = sum(simulated(100.0, **case, seed=seed) for seed in range(600)) / 600
    expected = expected_hours(100.0, 2.0, between_failures=10.0, save=0.25, restart=0.5)
    assert math.isclose(mean, expected, rel_tol=0.01)


@pytest.mark.parametrize(("between", "save"), [(3.1, 0.01), (100.0, 0.05), (2.0, 0.5)])
def test_no_other_interval_is_shorter_than_the_best(between: float, save: float) -> None:
    best = best_interval(between, save)
    whole = expected_hours(100.0, best, between_failures=between, save=save, restart=0.1)
    for factor in (0.7, 0.95, 1.05, 1.4):
        assert expected_hours(100.0, best * factor, between_failures=between, save=save, restart=0.1) > whole


def test_rare_failures_give_youngs_interval() -> None:
    assert math.isclose(best_interval(1000.0, 0.01), math.sqrt(2 * 0.01 * 1000.0), rel_tol=0.01)


def test_llama_3_405b_is_interrupted_as_often_as_its_paper_says() -> None:
    found = goodput(54 * 24 * 0.9, gpus=16_384, failures=Failures.of_llama3())
    # 419 in 54 days, of which its authors kept more than 90 % (section 3.3.4).
    assert 400 < found.interruptions * 54 * 24 / found.hours < 440
    assert 0.9 < found.share < 1.0


def test_a_run_without_failures_takes_what_it_takes() -> None:
    found = goodput(10.0, gpus=8, failures=Failures(per_gpu_hour=0.0))
    assert (found.hours, found.interruptions, found.share) == (10.0, 0.0, 1.0)


def test_rates_below_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="per_gpu_hour=-1"):
        Failures(per_gpu_hour=-1)
