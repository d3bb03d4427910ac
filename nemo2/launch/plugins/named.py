# SPDX-License-Identifier: Apache-2.0
"""Creates plugins by name, for ``--plugins 'NsysPlugin(start_step=5,end_step=8)'`` and nemo-run's ``plugins=``."""

from collections.abc import Callable
from typing import Any

from nemo2.config.factories import Source


def _names() -> list[str]:
    from nemo2.launch import plugins

    return list(vars(plugins)["__all__"])


def _load(name: str) -> Callable[..., Any]:
    from nemo2.launch import plugins

    return getattr(plugins, name)


SOURCES = [Source("nemo_run.run.plugin:ExperimentPlugin", _names, _load)]
