# SPDX-License-Identifier: Apache-2.0
"""The ramp-up's arithmetic against Megatron's formula, and Megatron-Core's calculator against the same."""

import pytest
from megatron.core import num_microbatches_calculator as calculator

from nemo2.base.errors import ConfigError
from nemo2.data.batch_size import BatchSizeSchedule, setup_microbatch_calculator
from support.small_corpora import megatron_batch_size

# (global batch, [start, increment, samples]): even, uneven thirds, levels shorter than a step, more levels than samples
RAMPS = [
    (16, [4, 4, 40]),
    (32, [8, 8, 100]),
    (64, [4, 4, 49]),
    (64, [8, 8, 3]),
    (12, [4, 8, 1]),
    (24, [8, 4, 997]),
    (376, [4, 4, 1]),
]


@pytest.mark.parametrize(("size", "rampup"), RAMPS)
def test_the_batch_size_is_megatrons_for_every_number_of_consumed_samples(size, rampup):
    schedule = BatchSizeSchedule(size, rampup)
    for consumed in range(2 * rampup[2] + 10):
        assert schedule.at(consumed) == megatron_batch_size(consumed, size, rampup), consumed


@pytest.mark.parametrize(("size", "rampup"), RAMPS)
def test_jumping_over_steps_lands_where_walking_does(size, rampup):
    schedule = BatchSizeSchedule(size, rampup)
    walked = [0]
    for _ in range(200):
        walked.append(walked[-1] + megatron_batch_size(walked[-1], size, rampup))
    assert [schedule.after(0, steps) for steps in range(201)] == walked
    assert [schedule.after(walked[7], steps) for steps in range(50)] == walked[7:57]
    for samples in (size, 3 * size + 1, 500, 5000):
        begun = [start for start, end in zip(walked, walked[1:], strict=False) if end <= samples]
        if walked[-1] > samples:
            assert schedule.steps_within(0, samples) == len(begun)


@pytest.mark.parametrize(("size", "rampup"), [*RAMPS, (16, None), (16, [16, 4, 10])])
def test_megatron_cores_calculator_agrees_at_every_step(size, rampup):
    schedule = BatchSizeSchedule(size, rampup)
    try:
        setup_microbatch_calculator(schedule, micro_batch_size=2, data_parallel_size=2, rank=0)
        consumed = 0
        for _ in range(60):
            calculator.update_num_microbatches(consumed, consistency_check=True)
            assert calculator.get_current_global_batch_size() == schedule.at(consumed)
            assert calculator.get_num_microbatches() == schedule.at(consumed) // 4
            consumed = schedule.after(consumed, 1)
    finally:
        calculator.destroy_num_microbatches_calculator()


@pytest.mark.parametrize(
    ("size", "rampup", "words"),
    [
        (0, None, "global_batch_size=0: must be a whole number"),
        (8.0, None, "global_batch_size=8.0"),
        (16, [4, 4], "must be .start batch size, increment, samples"),
        (16, [4, 5, 40], "steps of 5 from 4 never reach global_batch_size=16"),
        (16, [32, 4, 40], "steps of 4 from 32 never reach"),
        (16, [4, 4, 0], r"rampup_batch_size\.samples=0"),
    ],
)
def test_a_schedule_that_leads_nowhere_is_refused(size, rampup, words):
    with pytest.raises(ConfigError, match=words):
        BatchSizeSchedule(size, rampup)
