# SPDX-License-Identifier: Apache-2.0
"""The device that this process trains on, and everything that depends on the kind of device."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
