# SPDX-License-Identifier: Apache-2.0
"""Plugins under NeMo 2.0's names. Each edits a recipe and its executor together before the checks run.

A plugin is nemo-run's ``run.Plugin`` with one method, ``setup(task, executor)``. `apply_plugins` applies
plugins, and so does nemo-run's own `Experiment.add(plugins=...)`.
"""

from nemo2.base.lazy import front_door
from nemo2.config.announced import announce

announce(f"{__name__}.named")
__getattr__, __dir__, __all__ = front_door(__name__, __file__)
