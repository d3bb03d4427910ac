# SPDX-License-Identifier: Apache-2.0
"""Settings that change nothing or that the machine determines: lines about them, logged once per process, on rank 0, and the
refusal of arguments that only NeMo's signatures have.

A setting that nothing reads in a run warns if its user loses nothing by it, such as a setting of experts on a dense model. If its
user expects another model or other training from it, a rule of `nemo2.preflight.checks` refuses it.
"""

import logging
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.base.place import here

_log = logging.getLogger(__name__)
_announced: set[str] = set()


def announce_machine_settings(changed: Mapping[str, tuple[Any, str]]) -> None:
    """Log one line for the settings that this process hasn't announced before: names with their values and reasons."""
    by_reason: dict[str, list[str]] = {}
    for name, (used, why) in changed.items():
        if name not in _announced:
            by_reason.setdefault(why, []).append(f"{name}={used}")
    _announced.update(changed)
    if by_reason and here().rank == 0:
        changes = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        _log.info("Settings that this machine determines: %s.", changes)


def warn_without_effect(why: str, **arguments: tuple[Any, Any]) -> None:
    """Warn about arguments that have another value than their default. nemo2 accepts them because NeMo's or Lightning's
    signature has them.

    Args:
        why: What happens instead, as a sentence.
        arguments: The value and the default of each argument.
    """
    for name, (value, default) in arguments.items():
        if value != default:
            setting = f"{name}={value!r}"
            warn_once(f"{setting} has no effect. {why}", about=setting)


def warn_once(message: str, *, about: str = "") -> None:
    """Warn on rank 0, unless this process has done so before.

    Args:
        about: The setting. One message about it is enough. "": the message itself.
    """
    if (about or message) not in _announced and here().rank == 0:
        _announced.add(about or message)
        _log.warning("%s", message)


def warn_about_unread(config: Any, prefix: str, why: str, *, but: str = "") -> None:
    """Warn about the fields of a dataclass that begin with ``prefix`` and have another value than their default.

    Args:
        why: Why nothing reads them, as a sentence.
        but: A field that isn't one of them.
    """
    own = [
        one for one in fields(config) if one.name.startswith(prefix) and one.name != but and one.default is not MISSING
    ]
    warn_without_effect(why, **{one.name: (getattr(config, one.name), one.default) for one in own})


def only_defaults(why: str, **arguments: tuple[Any, Any]) -> None:
    """Refuse arguments that NeMo 2.0's entry points have and that mean nothing here, unless they have their defaults.

    Args:
        why: They mean nothing, a sentence.
        arguments: The value and the default of each argument.

    Raises:
        ConfigError: naming the first that has another value.
    """
    for name, (value, default) in arguments.items():
        if value != default:
            raise ConfigError(f"{name}={value!r}: {why} Leave it out.")
