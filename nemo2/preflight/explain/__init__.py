# SPDX-License-Identifier: Apache-2.0
"""Explains the value of a recipe's setting: who set it, who overrode it, and which value the run uses."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
