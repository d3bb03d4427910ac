# SPDX-License-Identifier: Apache-2.0
"""Userbuffers, in which tensor-parallel communication overlaps with computation. `nemo2.mcore.settle.overlap` decides what
overlaps."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
