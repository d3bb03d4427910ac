# SPDX-License-Identifier: Apache-2.0
"""``--tracker NAME``: logs a run to an experiment tracker, under the run's name."""

import os
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.training.run_dir.trackers import TRACKERS

OFFLINE = ":offline"
"""The suffix of a tracker's name for offline use: the tracker sends nothing."""


def tracker_called(word: str) -> tuple[Any, bool]:
    """The tracker that ``word`` names, and whether it stays offline. Raises ConfigError for an unknown name."""
    name, offline = word.removesuffix(OFFLINE), word.endswith(OFFLINE)
    if name not in TRACKERS:
        raise ConfigError(
            f"--tracker {word}: there is no tracker of this name{did_you_mean(name, TRACKERS)} Known trackers are "
            f"{', '.join(TRACKERS)}. NAME{OFFLINE} keeps the files on this machine. Set any other logger of Lightning "
            "in log.extra_loggers."
        )
    return TRACKERS[name], offline


def add_trackers(recipe: Any, words: Iterable[str]) -> None:
    """Add the loggers that ``words`` name to ``recipe.log``, unless it has them. Errors: see `tracker_called`."""
    from nemo2.config import Config

    for word in words:
        tracker, offline = tracker_called(word)
        own = logger_of(recipe.log, tracker)
        if own is None:
            own = Config(resolve_name(tracker.logger))
            if tracker.log_field == "extra_loggers":
                recipe.log.extra_loggers = [*(recipe.log.extra_loggers or []), own]
            else:
                setattr(recipe.log, tracker.log_field, own)
        if tracker.log_field == "tensorboard":
            own.save_dir = own.save_dir if "save_dir" in own.__arguments__ else "tb_logs"
        for argument, value in tracker.offline.items() if offline else ():
            setattr(own, argument, value)


def logger_of(log: Any, tracker: Any) -> Optional[Any]:
    """The config of this tracker's logger in ``recipe.log``. None: there is none."""
    from nemo2.config.walk import class_of

    own = getattr(log, tracker.log_field, None)
    candidates = (own or []) if tracker.log_field == "extra_loggers" else [own]
    return next((one for one in candidates if getattr(class_of(one), "__name__", "") == tracker.kind), None)


def variables_for(words: Iterable[str]) -> dict[str, str]:
    """The environment variables that these trackers read, with their values here, for ranks that don't inherit them."""
    names = [name for word in words for name in tracker_called(word)[0].variables]
    return {name: os.environ[name] for name in names if os.environ.get(name)}
