# SPDX-License-Identifier: Apache-2.0
"""Communication that overlaps with computation, and its buffers."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
