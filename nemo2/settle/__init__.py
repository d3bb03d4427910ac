# SPDX-License-Identifier: Apache-2.0
"""What a recipe will be on a machine: its world, its settings as a run has them, and what the run would refuse."""

from nemo2.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
