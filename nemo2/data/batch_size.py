# SPDX-License-Identifier: Apache-2.0
"""The number of samples that a step trains on: a constant global batch, or Megatron's linear ramp-up.

Loaders run ahead of training because workers prefetch, so they can't read a step's batch size from Megatron-Core's
process-wide calculator. The batch size is a pure function of the consumed samples, defined here. The calculator is set
up from the same function, so both agree at every step.
"""

import inspect
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Optional

from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError


class BatchSizeSchedule:
    """The global batch size as a function of the samples consumed.

    `rampup` is Megatron's ``[start, increment, samples]``: the batch size starts at ``start`` and grows by
    ``increment`` at equal intervals, so that it reaches `global_batch_size` after ``samples`` samples. None: constant.

    Source: Megatron-Core 0.16 ``RampupBatchsizeNumMicroBatchesCalculator.update``, including its rounding.

    Raises:
        ConfigError: a size isn't a positive whole number, or the increments don't lead from the start to the end.
    """

    def __init__(self, global_batch_size: int, rampup: Optional[Sequence[int]] = None) -> None:
        require_counts("", global_batch_size=global_batch_size)
        self.global_batch_size = global_batch_size
        self.rampup = None if rampup is None else tuple(rampup)
        self.start, self.increment, self.thresholds = global_batch_size, 0, []
        if rampup is None:
            return
        if len(rampup) != 3:
            raise ConfigError(
                f"rampup_batch_size={list(rampup)!r}: must be [start batch size, increment, samples to ramp over]."
            )
        start, increment, samples = rampup
        require_counts("rampup_batch_size", start=start, increment=increment, samples=samples)
        if start > global_batch_size or (global_batch_size - start) % increment:
            raise ConfigError(
                f"rampup_batch_size={list(rampup)!r}: steps of {increment} from {start} never reach "
                f"global_batch_size={global_batch_size}. Set an increment that divides their difference."
            )
        increments = (global_batch_size - start) // increment
        if increments == 0:
            return
        self.start, self.increment = start, increment
        self.thresholds = [_reached(level, samples / increments) for level in range(1, increments + 1)]

    def at(self, consumed_samples: int) -> int:
        """The global batch size of the step that begins after `consumed_samples`."""
        return self.start + self.increment * bisect_right(self.thresholds, consumed_samples)

    def after(self, consumed_samples: int, steps: int) -> int:
        """The samples consumed `steps` steps after `consumed_samples`. The cost grows with the number of the ramp's
        levels."""
        while steps > 0:
            batch, level = self.at(consumed_samples), bisect_right(self.thresholds, consumed_samples)
            taken = steps
            if level < len(self.thresholds):
                to_next_level = -(-(self.thresholds[level] - consumed_samples) // batch)
                taken = min(steps, to_next_level)
            consumed_samples += taken * batch
            steps -= taken
        return consumed_samples

    def steps_within(self, consumed_samples: int, samples: int) -> int:
        """The number of whole steps, from `consumed_samples` on, that fit into `samples` samples."""
        steps, end = 0, consumed_samples + samples
        while True:
            batch, level = self.at(consumed_samples), bisect_right(self.thresholds, consumed_samples)
            taken = (end - consumed_samples) // batch
            if level == len(self.thresholds):
                return steps + max(0, taken)
            taken = min(taken, -(-(self.thresholds[level] - consumed_samples) // batch))
            if taken <= 0:
                return steps
            steps += taken
            consumed_samples += taken * batch

    def check(self, micro_batch_size: int, data_parallel_size: int) -> None:
        """Check that every batch size of the schedule is a whole number of micro-batches on every data-parallel rank.

        Raises:
            ConfigError: a batch size isn't. The message names the nearest valid sizes.
        """
        require_counts("", micro_batch_size=micro_batch_size)
        unit = micro_batch_size * data_parallel_size
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            near = f"{below} or {below + unit}" if below else f"{unit}"
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not a multiple of micro_batch_size * data-parallel "
                f"size = {micro_batch_size} * {data_parallel_size} = {unit}. Set it to a multiple; nearest: {near}."
            )
        if self.thresholds and (self.start % unit or self.increment % unit):
            raise ConfigError(
                f"rampup_batch_size=[{self.start}, {self.increment}, ...]: every batch size must be a multiple of "
                f"micro_batch_size * data-parallel size = {micro_batch_size} * {data_parallel_size} = {unit}. Set "
                f"start and increment to multiples of {unit}."
            )


def setup_microbatch_calculator(
    schedule: BatchSizeSchedule, *, micro_batch_size: int, data_parallel_size: int, rank: int, consumed_samples: int = 0
) -> None:
    """Set Megatron-Core's process-wide calculator to `schedule`, replacing any previous one.

    0.16 takes the ramp-up as ``rampup_batch_size``. Later releases ignore that argument and take the steps as text
    ("0:8 16:12", samples and batch sizes). Both receive nemo2's thresholds: the text in full, and ``rampup_batch_size``
    through its own arithmetic, from which the thresholds derive.
    """
    from megatron.core import num_microbatches_calculator as calculator

    arguments: dict[str, Any] = {
        "rank": rank,
        "rampup_batch_size": None,
        "global_batch_size": schedule.global_batch_size,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": data_parallel_size,
    }
    if schedule.thresholds:
        parameters = inspect.signature(calculator.reconfigure_num_microbatches_calculator).parameters
        if "step_batch_size_schedule" in parameters:
            sizes = {0: schedule.start}
            # If a ramp is so short that two levels begin at one sample, the higher level counts.
            sizes.update({t: schedule.start + schedule.increment * (i + 1) for i, t in enumerate(schedule.thresholds)})
            arguments["step_batch_size_schedule"] = " ".join(f"{t}:{size}" for t, size in sizes.items())
        else:
            arguments["rampup_batch_size"] = list(schedule.rampup or ())
    calculator.reconfigure_num_microbatches_calculator(**arguments)
    calculator.update_num_microbatches(consumed_samples, consistency_check=False)


def _reached(level: int, samples_per_level: float) -> int:
    """The smallest number of consumed samples at which Megatron's ``int(consumed / samples_per_level)`` is at least
    `level`.

    It is at most one sample past the ramp, because Megatron then uses the full batch.
    """
    consumed = max(0, int(level * samples_per_level) - 1)
    while int(consumed / samples_per_level) < level:
        consumed += 1
    return consumed
