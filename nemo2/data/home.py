# SPDX-License-Identifier: Apache-2.0
"""The folders of data and models that nemo2 downloads or creates.

The variables are NeMo 2.0's, so that one setting moves the caches of both: ``$NEMO_HOME``, ``$NEMO_DATASETS_CACHE`` and
``$NEMO_MODELS_CACHE``. The default is below ``~/.cache/nemo2``.
"""

import os
from pathlib import Path

__all__ = [
    "DEFAULT_NEMO_CACHE_HOME",
    "DEFAULT_NEMO_DATASETS_CACHE",
    "DEFAULT_NEMO_MODELS_CACHE",
    "NEMO_CACHE_HOME",
    "NEMO_DATASETS_CACHE",
    "NEMO_MODELS_CACHE",
    "datasets_home",
    "models_home",
    "nemo_home",
]

_HOME = "~/.cache/nemo2"


def nemo_home() -> Path:
    """``$NEMO_HOME``, which defaults to ``~/.cache/nemo2``."""
    return Path(os.environ.get("NEMO_HOME") or _HOME).expanduser()


def datasets_home() -> Path:
    """``$NEMO_DATASETS_CACHE``, which defaults to ``datasets`` in `nemo_home`."""
    return Path(os.environ.get("NEMO_DATASETS_CACHE") or nemo_home() / "datasets").expanduser()


def models_home() -> Path:
    """``$NEMO_MODELS_CACHE``, which defaults to ``models`` in `nemo_home`."""
    return Path(os.environ.get("NEMO_MODELS_CACHE") or nemo_home() / "models").expanduser()


# NeMo's names, with the values of the variables at import.
DEFAULT_NEMO_CACHE_HOME, NEMO_CACHE_HOME = Path(_HOME).expanduser(), nemo_home()
DEFAULT_NEMO_DATASETS_CACHE, DEFAULT_NEMO_MODELS_CACHE = NEMO_CACHE_HOME / "datasets", NEMO_CACHE_HOME / "models"
NEMO_DATASETS_CACHE, NEMO_MODELS_CACHE = datasets_home(), models_home()
