# SPDX-License-Identifier: Apache-2.0
"""Ranks without warnings and messages, on the backend's patches from their start: for commands of many short runs.

Preload this module with ``ranks.prepare("support.quiet")``, or import it in a command that forks ranks itself. Tests
don't use it, because some of them check warnings and patches.
"""

import logging
import warnings

from nemo2.base.backend import get_backend

warnings.filterwarnings("ignore")
import support.warm  # noqa: E402, F401  (its imports warn)

get_backend().install()
for _name in ("lightning.pytorch", "lightning.fabric", "megatron"):
    logging.getLogger(_name).setLevel(logging.ERROR)
