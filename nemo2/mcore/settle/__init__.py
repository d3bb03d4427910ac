# SPDX-License-Identifier: Apache-2.0
"""Works out a recipe's form on a machine: its world, its settings as a run has them, its refusals."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
