# SPDX-License-Identifier: Apache-2.0
"""Where data is kept that nemo2 downloads or makes for itself."""

import os
from pathlib import Path


def datasets_home() -> Path:
    """``$NEMO_DATASETS_CACHE``, which defaults to ``$NEMO_HOME/datasets``, and that to ``~/.cache/nemo2/datasets``: NeMo 2.0's
    variables, so that one setting moves the caches of both."""
    home = Path(os.environ.get("NEMO_HOME") or "~/.cache/nemo2")
    return Path(os.environ.get("NEMO_DATASETS_CACHE") or home / "datasets").expanduser()
