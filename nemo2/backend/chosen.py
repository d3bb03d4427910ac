# SPDX-License-Identifier: Apache-2.0
"""The one backend of this process."""

import torch

from nemo2.backend.base import Backend

_backend: Backend | None = None


def get_backend() -> Backend:
    """The backend of this process: CUDA where `torch.cuda.is_available()`, otherwise CPU. Decided once, at the first
    call; nothing is patched by asking."""
    global _backend
    if _backend is None:
        if torch.cuda.is_available():
            from nemo2.backend.cuda import CudaBackend

            _backend = CudaBackend()
        else:
            from nemo2.backend.cpu import CpuBackend

            _backend = CpuBackend()
    return _backend
