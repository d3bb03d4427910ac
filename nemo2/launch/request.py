# SPDX-License-Identifier: Apache-2.0
"""A launch that has passed all checks, in the form that every engine takes."""

from dataclasses import dataclass
from typing import Any

from nemo2.launch.result import RunResult, Status


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A recipe and the executor that runs it, both copies that belong to this launch."""

    recipe: Any
    executor: Any
    name: str
    """The run's name."""
    experiment_id: str
    """The launch's own name."""
    devices: int
    """Ranks per node."""
    nodes: int
    dryrun: bool = False
    """Print what would be started."""
    detach: bool = False
    """Don't wait for the end."""
    reasons: tuple[str, ...] = ()
    """The settings that the launcher chose, each with its reason, for a dry run."""
    chain: int = 1
    """Jobs of Slurm, each of which continues the one before it."""

    def result(self, status: Status, exit_code: int = 0, **facts: Any) -> RunResult:
        """The launch's result. ``facts``: other fields of `RunResult`."""
        return RunResult(status=status, exit_code=exit_code, experiment_id=self.experiment_id, **facts)
