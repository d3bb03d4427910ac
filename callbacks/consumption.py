# SPDX-License-Identifier: Apache-2.0
"""The samples and tokens that training has consumed, and units of time by name."""

from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean

SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


def seconds_per(unit: str, *, of: str) -> float:
    """The seconds of a time unit. ``of`` names the caller in errors.

    Raises:
        ConfigError: the unit is not in `SECONDS`.
    """
    if unit not in SECONDS:
        raise ConfigError(
            f"{of}.time_unit={unit!r}: must be one of {', '.join(SECONDS)}{did_you_mean(str(unit), SECONDS, listed=True)}"
        )
    return SECONDS[unit]


def sampler_of(trainer: Any) -> Any:
    """The run's data sampler, which counts samples. None without a data sampler."""
    owners = (trainer.strategy, getattr(trainer, "datamodule", None))
    return next((sampler for owner in owners if (sampler := getattr(owner, "data_sampler", None)) is not None), None)


def global_batch(trainer: Any) -> Optional[tuple[int, int]]:
    """The samples and the tokens per sample of the step that has not ended yet. None without a data sampler."""
    sampler = sampler_of(trainer)
    return None if sampler is None else (sampler.current_global_batch_size, sampler.seq_len)


def consumed_by(trainer: Any) -> tuple[int, int]:
    """The samples and tokens that training has consumed so far, including those before a resume. Zeros without a
    data sampler."""
    sampler = sampler_of(trainer)
    samples = int(getattr(sampler, "consumed_samples", 0))
    return samples, samples * int(getattr(sampler, "seq_len", 0))
