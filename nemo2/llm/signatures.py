# SPDX-License-Identifier: Apache-2.0
"""Arguments that NeMo 2.0's entry points have, and that mean nothing here: they are taken at their defaults."""

from typing import Any

from nemo2.errors import ConfigError


def only_defaults(why: str, **arguments: tuple[Any, Any]) -> None:
    """
    Args:
        why: They mean nothing, a sentence.
        arguments: The value and the default of each argument.

    Raises:
        ConfigError: naming the first that has another value.
    """
    for name, (value, default) in arguments.items():
        if value != default:
            raise ConfigError(f"{name}={value!r}: {why} Leave it out.")
