# SPDX-License-Identifier: Apache-2.0
"""A GPU that isn't there: libraries that let an unmodified CUDA build of torch believe in H100s (README.md)."""

import os
from collections.abc import Mapping
from pathlib import Path

HOME = Path(os.environ.get("PRETEND_GPU_HOME") or Path(__file__).parents[2] / ".pretend_gpu").resolve()
LIBRARIES = HOME / "lib"
CORE = "libpretend_core.so"


def environment(base: Mapping[str, str] = os.environ, *, gpus: int = 1) -> dict[str, str]:
    """The variables of a process that is to see ``gpus`` pretend GPUs.

    The libraries are loaded first: torch's own search path would find NVIDIA's before those of LD_LIBRARY_PATH.
    """
    site = str(Path(__file__).parent / "site")
    libraries = [LIBRARIES / CORE, *sorted(LIBRARIES.glob("lib*.so.*"))]
    return {
        **base,
        "PRETEND_GPU": "1",
        "PRETEND_GPU_COUNT": str(gpus),
        "LD_LIBRARY_PATH": _joined(str(LIBRARIES), base.get("LD_LIBRARY_PATH")),
        "LD_PRELOAD": _joined(*map(str, libraries), base.get("LD_PRELOAD")),
        "PYTHONPATH": _joined(site, base.get("PYTHONPATH")),
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        # Transformer Engine opens these by their paths.
        "CUDNN_PATH": str(LIBRARIES),
        "CURAND_PATH": str(LIBRARIES),
        # Whether there is a GPU is asked of NVML, so that a process that ranks are forked from may ask.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Compiled kernels would have no effect, and interpreted ones have.
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        # Transformer Engine updates the scales of delayed scaling in Python: its kernel would have no effect.
        "NVTE_UNFUSED_FP8_UPDATE": "1",
    }


def _joined(*parts: str | None) -> str:
    return ":".join(part for part in parts if part)
