# SPDX-License-Identifier: Apache-2.0
"""Why a setting of a recipe is what it is: who set it, what overruled whom, and what runs in the end."""

from nemo2.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
