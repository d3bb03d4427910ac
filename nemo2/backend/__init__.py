# SPDX-License-Identifier: Apache-2.0
"""The device this process trains on, and everything that has to be done differently for it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo2.backend.base import Backend as Backend
    from nemo2.backend.base import get_backend as get_backend

__all__ = ["Backend", "get_backend"]


def __getattr__(name: str) -> Any:
    # Lazy, because `nemo2.backend.extras` is asked by code that must not import torch.
    if name in __all__:
        from nemo2.backend import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
