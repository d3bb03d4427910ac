# SPDX-License-Identifier: Apache-2.0
"""Errors for the user: one paragraph with the field, its value, the rule and the fix.

Every error that nemo2 raises on purpose is a `Nemo2Error`. The command line prints its message alone and keeps
tracebacks for unexpected errors.
"""

from collections.abc import Callable, Sequence
from typing import Any

EXIT_PREEMPTED = 143
"""128 + SIGTERM: the run has saved and stopped on request. Running the same command resumes it."""


LOST_PEER = ("Connection closed by peer", "Connection reset", "remote process exited", "Broken pipe")
"""The words with which gloo and NCCL report, in the text of a RuntimeError, that another process is gone."""
ON_ANOTHER_RANK = "on another rank, whose log gives the reason"
"""The reason of an error that Megatron-Core reports with its details on one rank only."""


class Nemo2Error(Exception):
    """Base class of nemo2's errors, whose messages are complete without a traceback."""


def message_of(error: BaseException) -> str:
    """An error's message without the paragraph that fiddle appends to what a configured class raises."""
    return str(error).partition("\n\nFiddle context:")[0]


class ConfigError(Nemo2Error, ValueError):
    """The user's configuration breaks a rule. Raised before any work starts.

    Args:
        rule: The rule's name in the table of rules (`nemo2.preflight.checks`). None: no rule of the table covers this place.
        rules: The rule of each line of the message. Empty: ``rule`` is that of all lines.
    """

    def __init__(self, *message: object, rule: str | None = None, rules: Sequence[str] = ()) -> None:
        super().__init__(*message)
        self.rule = rules[0] if rules else rule
        self.rules = rules


class CannotBuild(ConfigError):
    """Building a rank of a recipe that breaks no rule ends in an error of Megatron-Core, in a rehearsal as in a run."""

    RULE = "ranks-can-be-built"

    def __init__(self, *message: object) -> None:
        super().__init__(*message, rule=self.RULE)


class UnsetFieldError(ConfigError, AttributeError):
    """A required field of a recipe is read before it is set."""


class UnknownNameError(ConfigError, AttributeError, TypeError):
    """The configured class or function has no such name.

    The error is an `AttributeError` where a field of a recipe is read or set, so that `hasattr` works, and a
    `TypeError` where a keyword is passed, like Python's own errors.

    ``hint`` is called only when the message is read. `hasattr` and similar
    functions ask a recipe for hundreds of unknown names, and comparing each with all known names would take most of
    their time.

    Args:
        hint: Returns the end of the sentence.
    """

    def __init__(self, *message: object, hint: Callable[[], str] = str) -> None:
        super().__init__(*message)
        self._hint = hint

    def __str__(self) -> str:
        return f"{super().__str__()}{self._hint()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


class DataError(Nemo2Error):
    """A dataset, tokenizer or index file is missing or corrupt, or does not fit the model."""


class CheckpointError(Nemo2Error):
    """A checkpoint is missing or incomplete, or was written for another purpose."""


class OutputExists(ConfigError, CheckpointError):
    """Something already exists where a file or folder would be written. Nothing was replaced."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint differs from what was written, or is missing. An earlier checkpoint may be usable."""


class RunFinished(CheckpointError):
    """The run has reached its last step, so there is nothing to resume."""


class SaveFailed(CheckpointError, RuntimeError):
    """A checkpoint could not be written, because a disk is full or a rank was lost. Earlier checkpoints are
    unchanged, and a restart resumes from them."""


class SecurityError(Nemo2Error):
    """A file or name requests something that could run code or reach outside its directory."""


class Preempted(SystemExit):
    """The run was asked to stop, has saved and ends with exit code 143, like a process that SIGTERM ended.

    It is a `SystemExit`, so that the process ends without a traceback and no `except Exception` catches it.

    Args:
        message: The text that the run shows.
    """

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.message = message


class RuntimeFault(Nemo2Error, RuntimeError):
    """A correctly configured run failed: a rank was lost, a disk is full, or the loss is not finite."""
