# SPDX-License-Identifier: Apache-2.0
"""Cost of interruptions to a long run: the best time between checkpoints, and the expected duration.

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22
(2006): with failures at random, M hours apart on average, a save that stops the run for S and a restart of R, a run of T hours
with a checkpoint every I hours of work takes (its equation 20)

    M exp(R / M) (exp((I + S) / M) - 1) T / I

The best interval is near sqrt(2 S M) (J. W. Young, 1974); here the expression above is minimised itself.
"""

import dataclasses
import math

from nemo2.errors import ConfigError

LLAMA3_INTERRUPTIONS = 419
"""Unexpected interruptions of Llama 3 405B in `LLAMA3_DAYS` on `LLAMA3_GPUS` H100s (arXiv 2407.21783, section 3.3.4)."""
LLAMA3_DAYS = 54
LLAMA3_GPUS = 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a job is interrupted, and what each time costs.

    Attributes:
        per_gpu_hour: interruptions of the whole job per hour and GPU in it.
        save_seconds: for which a checkpoint stops training. The default is asynchronous saving's: PyTorch and IBM measured
            6.3 s for a 7B model (148.8 s otherwise).
        restart_seconds: from an interruption to the first step after it: noticed, rescheduled, loaded, warmed up.
    """

    per_gpu_hour: float
    save_seconds: float = 6.3
    restart_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("per_gpu_hour", "save_seconds", "restart_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more.")

    @classmethod
    def of_llama3(cls, **changes: float) -> "Failures":
        """With the rate of Llama 3 405B's run: one interruption per 50,677 GPU hours."""
        return cls(**{"per_gpu_hour": LLAMA3_INTERRUPTIONS / (LLAMA3_DAYS * 24 * LLAMA3_GPUS), **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """A run with its interruptions.

    Attributes:
        interval_hours: the training hours between checkpoints that minimize the total; the run's own hours without
            interruptions.
        hours: the expected total.
        interruptions: the expected number in that time.
        share: the fraction of the time that is training and is kept.
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
    interval = min(hours, best_interval(1 / rate, failures.save_seconds / 3600))
    whole = expected_hours(
        hours,
        interval,
        between_failures=1 / rate,
        save=failures.save_seconds / 3600,
        restart=failures.restart_seconds / 3600,
    )
    return Goodput(interval_hours=interval, hours=whole, interruptions=whole * rate, share=hours / whole)


def expected_hours(hours: float, interval: float, *, between_failures: float, save: float, restart: float) -> float:
    """Daly's equation 20: hours in all for ``hours`` of training, everything in hours."""
    m = between_failures
    return m * math.exp(restart / m) * math.expm1((interval + save) / m) * hours / interval


def best_interval(between_failures: float, save: float) -> float:
    """The interval at which `expected_hours` is least; sqrt(2 * save * between_failures) where both are far apart.

    Where the slope is 0, exp((I + S) / M) (1 - I / M) = 1: the left side falls in I, so it is found by halving.
    """
    m = between_failures
    if save == 0:
        # Nothing speaks against saving at every moment; a thousandth of the time between failures is as good.
        return m / 1000
    low, high = 0.0, m
    for _ in range(60):
        middle = (low + high) / 2
        if math.exp((middle + save) / m) * (1 - middle / m) > 1:
            low = middle
        else:
            high = middle
    return high
