# SPDX-License-Identifier: Apache-2.0
"""Samples and tokens that training has consumed, and units of time by their names."""

from typing import Any

from nemo2.errors import ConfigError
from nemo2.names import did_you_mean

SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


def seconds_per(unit: str, *, of: str) -> float:
    """Seconds of a unit by its name; ``of`` is who was given it.

    Raises:
        ConfigError: it is none of `SECONDS`.
    """
    if unit not in SECONDS:
        raise ConfigError(f"{of}.time_unit={unit!r}: must be one of {', '.join(SECONDS)}{did_you_mean(unit, SECONDS)}")
    return SECONDS[unit]


def sampler_of(trainer: Any) -> Any:
    """The data sampler of a run, which counts samples; None without one."""
    return getattr(trainer.strategy, "data_sampler", None) or getattr(trainer.datamodule, "data_sampler", None)


def consumed_by(trainer: Any) -> tuple[int, int]:
    """Samples and tokens that training has consumed until now, those before a resume included; zeros without a data sampler."""
    sampler = sampler_of(trainer)
    samples = int(getattr(sampler, "consumed_samples", 0))
    return samples, samples * int(getattr(sampler, "seq_len", 0))
