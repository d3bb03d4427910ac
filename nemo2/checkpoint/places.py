# SPDX-License-Identifier: Apache-2.0
"""Where weights are that a path names by a scheme, as in NeMo 2.0: ``hf://`` and ``nemo://``."""

import os
from pathlib import Path

HUGGING_FACE = "hf://"
"""In front of a folder of released weights (``hf:///folder``) or a repository of theirs (``hf://organisation/name``)."""
IMPORTED = "nemo://"
"""In front of the name of an imported model."""


def models_cache() -> Path:
    """Where imported models are kept that nobody names a place for: ``$NEMO_MODELS_CACHE``, or ``models`` in ``$NEMO_HOME``,
    which is ``~/.cache/nemo2``."""
    home = os.environ.get("NEMO_HOME") or "~/.cache/nemo2"
    return Path(os.environ.get("NEMO_MODELS_CACHE") or f"{home}/models").expanduser()


def resolved(path: str) -> Path:
    """The folder of a checkpoint's path, in which ``nemo://name`` stands for an imported model."""
    if path.startswith(IMPORTED):
        return models_cache() / path.removeprefix(IMPORTED)
    return Path(path).expanduser()
