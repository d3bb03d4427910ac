# SPDX-License-Identifier: Apache-2.0
"""The backend of this process."""

import torch

from nemo2.base.backend.base import Backend

_backend: Backend | None = None


def get_backend() -> Backend:
    """Return the backend of this process: CUDA if `torch.cuda.is_available()`, otherwise CPU.

    The choice is made once, at the first call. The call patches nothing.
    """
    global _backend
    if _backend is None:
        if torch.cuda.is_available():
            from nemo2.base.backend.cuda import CudaBackend

            _backend = CudaBackend()
        else:
            from nemo2.base.backend.cpu import CpuBackend

            _backend = CpuBackend()
    return _backend
