# SPDX-License-Identifier: Apache-2.0
"""Advice in the language of its reader: options on the command line, fields and arguments in Python."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from nemo2.base.variables import environment

_VARIABLE = "NEMO2_COMMAND"
"""The command that a user has typed, here and in the processes that it starts."""


def advice(option: str, python: str) -> str:
    """``option`` if the reader has typed a command, else ``python``, which code can do."""
    return option if _VARIABLE in os.environ else python


def typed_as(name: str, value: Any, *, option: str = "") -> str:
    """An argument and its value as the reader has typed them: ``--top-k 3`` or ``top_k=3``.

    Args:
        name: The argument, which may be a field of another: ``pruning_config.drop_layers``.
        value: Its value.
        option: The option. "": that of the last name.
    """
    words = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    return advice(f"{option or '--' + name.rpartition('.')[2].replace('_', '-')} {words}", f"{name}={value}")


def new_name() -> str:
    """How to give a run another name, as the end of a sentence."""
    return advice("use --name NAME", "set another log.name")


def own_data() -> str:
    """How to train on text of one's own, as the end of a sentence."""
    return advice("pass --data PATH", "set recipe.data to a PreTrainingDataModule with paths=PATH")


def dataset_setting(name: str, value: str) -> str:
    """How to set an entry of fine-tuning data's ``dataset_kwargs``, as words to type or code to copy."""
    return advice(f"data.dataset_kwargs.{name}={value}", f"dataset_kwargs={{{name!r}: {value!r}}}")


def export_merged() -> str:
    """How to use trained adapters without peft, as the end of a sentence."""
    return "export the merged model: " + advice(
        "nemo2 export CHECKPOINT --merge", "llm.peft.merge_lora(...), then llm.export_ckpt(...)"
    )


def again() -> str:
    """What goes on with a run that has stopped, as a line to copy."""
    return os.environ.get(_VARIABLE, "the same command or script")


def print_warning(message: str) -> None:
    """Warn on stderr of a launch, which has no log yet."""
    print(f"warning: {message}", file=sys.stderr)


def for_the_command_line(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """While this lasts, advice names options. ``arguments``: the command's, without secrets."""
    return environment({_VARIABLE: shlex.join(["nemo2", *arguments])})
