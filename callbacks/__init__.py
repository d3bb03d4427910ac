# SPDX-License-Identifier: Apache-2.0
"""Callbacks: one Lightning callback per file, loaded when it is asked for."""

from nemo2.base.lazy import front_door

if __name__ != "nemo2.callbacks":
    raise ImportError(
        "This folder is installed as `nemo2.callbacks`: write `from nemo2.callbacks import TimingCallback`."
    )

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
