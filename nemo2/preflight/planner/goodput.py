# SPDX-License-Identifier: Apache-2.0
"""The cost of interruptions to a long run: the best time between checkpoints, and the expected duration.

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22
(2006): with failures at random, M hours apart on average, a save that stops the run for S and a restart of R, a run of T hours
with a checkpoint every I hours of work takes (its equation 20)

    M exp(R / M) (exp((I + S) / M) - 1) T / I

The best interval is near sqrt(2 S M) (J. W. Young, 1974). This module minimizes the expression itself.
"""

import dataclasses
import math

from nemo2.base.errors import ConfigError

LLAMA3_INTERRUPTIONS = 419
"""Unexpected interruptions of Llama 3 405B in `LLAMA3_DAYS` on `LLAMA3_GPUS` H100s (arXiv 2407.21783, section 3.3.4)."""
LLAMA3_DAYS = 54
LLAMA3_GPUS = 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """The rate of a job's interruptions, and the cost of each.

    Attributes:
        per_gpu_hour: interruptions of the job per GPU hour.
        save_seconds: seconds for which a save stalls training. The default is that of an asynchronous save: PyTorch
            and IBM measured 6.3 s for a 7B model, and 148.8 s for a synchronous save.
        restart_seconds: seconds from an interruption to the next step. They include detection, rescheduling, loading
            and warm-up.
    """

    per_gpu_hour: float
    save_seconds: float = 6.3
    restart_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("per_gpu_hour", "save_seconds", "restart_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"Failures: {name}={getattr(self, name)!r} must be 0 or more.")

    @classmethod
    def of_llama3(cls, **changes: float) -> "Failures":
        """Failures at the rate of Llama 3 405B's run: one interruption per 50,677 GPU hours."""
        return cls(**{"per_gpu_hour": LLAMA3_INTERRUPTIONS / (LLAMA3_DAYS * 24 * LLAMA3_GPUS), **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """A run with its interruptions.

    Attributes:
        interval_hours: the hours of training between checkpoints that minimize `hours`. Without interruptions: the
            whole run.
        hours: the expected duration.
        interruptions: the expected number of interruptions.
        share: the fraction of `hours` that is useful training. Training that an interruption loses doesn't count.
    """

    interval_hours: float
    hours: float
    interruptions: float
    share: float


def goodput(hours: float, *, gpus: int, failures: Failures) -> Goodput:
    """The expected duration of ``hours`` of uninterrupted training, interruptions included."""
    rate = failures.per_gpu_hour * gpus
    if rate == 0:
        return Goodput(interval_hours=hours, hours=hours, interruptions=0.0, share=1.0)
    mean, save, restart = 1 / rate, failures.save_seconds / 3600, failures.restart_seconds / 3600
    interval = min(hours, best_interval(mean, save))
    whole = expected_hours(hours, interval, between_failures=mean, save=save, restart=restart)
    return Goodput(interval_hours=interval, hours=whole, interruptions=whole * rate, share=hours / whole)


def expected_hours(hours: float, interval: float, *, between_failures: float, save: float, restart: float) -> float:
    """The expected duration of ``hours`` of training, by Daly's equation 20. All arguments are in hours."""
    m = between_failures
    return m * math.exp(restart / m) * math.expm1((interval + save) / m) * hours / interval


def best_interval(between_failures: float, save: float) -> float:
    """The interval that minimizes `expected_hours`: about sqrt(2 * save * between_failures) if ``save`` is much shorter
    than ``between_failures``.

    At the minimum, exp((I + S) / M) (1 - I / M) = 1. The left side falls with I, so bisection finds the interval.
    """
    m = between_failures
    if save == 0:
        # Free saves would have no interval at all. A thousandth of the time between failures is as good.
        return m / 1000
    low, high = 0.0, m
    for _ in range(60):
        middle = (low + high) / 2
        if math.exp((middle + save) / m) * (1 - middle / m) > 1:
            low = middle
        else:
            high = middle
    return high
