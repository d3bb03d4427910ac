# SPDX-License-Identifier: Apache-2.0
"""Errors that a user is told of: one paragraph with the field, its value, the rule and the fix.

Every error that nemo2 raises on purpose is a `Nemo2Error`, so that the command line can print its message alone and
keep tracebacks for what nobody foresaw.
"""

from collections.abc import Callable
from typing import Any

EXIT_PREEMPTED = 143
"""128 + SIGTERM: the run has saved and stopped because it was asked to; the same command goes on."""


class Nemo2Error(Exception):
    """Anything nemo2 refuses or finds broken, with a message that is complete without its traceback."""


class ConfigError(Nemo2Error, ValueError):
    """The user's configuration breaks a rule. Raised before any work starts.

    ``rule`` is its name in the table of rules (`nemo2.checks`); None where none of these tells it in this place.
    """

    def __init__(self, *message: object, rule: str | None = None) -> None:
        super().__init__(*message)
        self.rule = rule


class UnknownNameError(ConfigError, AttributeError, TypeError):
    """A name that the configured class or function does not have.

    It is an `AttributeError` where a field of a recipe is read or set (so `hasattr` works) and a `TypeError` where a
    keyword is passed, as Python itself would raise.

    ``hint`` ends the sentence. It is called where somebody reads the message: `hasattr` and its like ask a recipe for hundreds of
    names that it doesn't have, and comparing each with all that it has takes longer than everything else that they do.
    """

    def __init__(self, *message: object, hint: Callable[[], str] = str) -> None:
        super().__init__(*message)
        self._hint = hint

    def __str__(self) -> str:
        return f"{super().__str__()}{self._hint()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


class DataError(Nemo2Error):
    """A dataset, tokenizer or index file is missing, corrupt or does not fit the model."""


class CheckpointError(Nemo2Error):
    """A checkpoint is missing, incomplete or was written for something else."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint isn't what was written, or isn't there: one before it may be."""


class RunFinished(CheckpointError):
    """The run has reached its last step: there is nothing to go on with."""


class SaveFailed(CheckpointError, RuntimeError):
    """A checkpoint could not be written, for a full disk or a lost rank. Those before it are untouched, and another start goes on
    from them."""


class SecurityError(Nemo2Error):
    """A file or name asks for something that could run code or reach outside its directory."""


class Preempted(SystemExit):
    """The run was asked to stop, has saved and ends: exit code 143, as of a process that SIGTERM ended.

    A `SystemExit`, so that it ends the process without a traceback and no `except Exception` holds it up.
    """

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.message = message


class RuntimeFault(Nemo2Error, RuntimeError):
    """A run that was set up correctly failed: a lost rank, a full disk, a loss that is not finite."""
