# SPDX-License-Identifier: Apache-2.0
"""One cuDNN for torch and Transformer Engine.

torch loads the cuDNN of its own packages. Transformer Engine loads the first that it finds in CUDNN_HOME, CUDNN_PATH, CUDA_HOME,
/usr/local/cuda and the loader's path (transformer_engine/common/__init__.py), which in NVIDIA's images is another version. With
both in a process, parts of one look for parts of the other, and the first fused attention ends the run with
CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED (seen with torch 2.11, Transformer Engine 2.17.1, cuDNN 9.19 beside 9.14).
"""

import importlib.util
import os
import re
from pathlib import Path

from nemo2.base.backend.extras import has

VARIABLES = ("CUDNN_HOME", "CUDNN_PATH")


def share_cudnn() -> None:
    """Point Transformer Engine to the cuDNN that torch brings, unless the user has chosen one. Without such a package, both load
    the system's."""
    if any(os.environ.get(name) for name in VARIABLES) or not has("transformer_engine"):
        return
    folder = packaged_cudnn()
    if folder is not None:
        os.environ[VARIABLES[0]] = str(folder)


def packaged_cudnn() -> Path | None:
    """The folder of the installed package ``nvidia-cudnn-*``, which torch's wheels need. None: it isn't installed."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ImportError:  # no package below nvidia
        return None
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if any(folder.glob("lib/libcudnn.so*"))), None)


def loaded_cudnn(maps: str) -> list[str]:
    """The files of cuDNN that a process has loaded, from the text of its ``/proc/PID/maps``. Two files: two versions."""
    return sorted(set(re.findall(r"(/\S*/libcudnn\.so\S*)", maps)))
