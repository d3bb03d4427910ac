# SPDX-License-Identifier: Apache-2.0
"""What a profile says of a Slurm cluster beyond nemo-run's executor. Loads neither nemo-run nor torch."""

from dataclasses import dataclass
from typing import Optional

from nemo2.base.counts import is_count
from nemo2.base.errors import ConfigError
from nemo2.launch.slurm.ship import CODES, Code
from nemo2.mcore.settle.machine import Machine


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """A profile's settings of a Slurm cluster beyond the fields of ``SlurmExecutor``."""

    python: str = ""
    """The interpreter of the ranks. "": this process's if paths of this machine are valid there, else ``python3``."""
    code: Code = "tree"
    runs: str = ""
    """The folder of runs whose recipes name no absolute directory. "": below the working directory, or over SSH
    beside jobs."""
    grace_seconds: Optional[int] = None
    """The time before the time limit at which a run is asked to save. None: derived from the size of its checkpoint."""
    requeue: bool = True
    """Whether Slurm may start the job again. Set it to False if the site forbids it; see also chains."""

    gpu: str = ""
    """The kind of the cluster's GPUs ("H100"), which decides variables and the check of memory. "": unknown."""

    def __post_init__(self) -> None:
        from nemo2.config.value_types import refuse_misfits  # fiddle, which `nemo2 list` doesn't load

        refuse_misfits(type(self), vars(self))
        for name in ("python", "runs", "gpu"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be text.")
        if self.python.startswith("~"):  # the script quotes it, and over SSH this machine's home is not the cluster's
            raise ConfigError(
                f"python={self.python!r}: must be an absolute path, or the name of a program on the PATH."
            )
        if self.runs and not self.runs.startswith("/"):
            raise ConfigError(f"runs={self.runs!r}: must be an absolute path on a file system that all nodes share.")
        if self.gpu:
            Machine.named(self.gpu, option="gpu")
        if self.code not in CODES:
            raise ConfigError(f"code={self.code!r}: must be one of {', '.join(CODES)}.")
        if self.grace_seconds is not None and not is_count(self.grace_seconds, 0):
            raise ConfigError(f"grace_seconds={self.grace_seconds}: must be 0 (never ask) or more seconds.")


def limit_seconds(limit: str) -> Optional[int]:
    """The seconds of a time limit in one of Slurm's forms. None: no limit.

    The forms are minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    Raises:
        ConfigError: another form.
    """
    if not limit or limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, rest = limit.rpartition("-")
    numbers = rest.split(":")
    if not all(number.isdecimal() for number in [*numbers, *([days] if dash else [])]) or len(numbers) > 3:
        raise ConfigError(f"time={limit!r}: Slurm takes MINUTES, HH:MM:SS or D-HH:MM:SS.")
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(number) * unit for number, unit in zip(numbers, units, strict=False))
