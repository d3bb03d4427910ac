# SPDX-License-Identifier: Apache-2.0
"""Start a recipe on this machine or a cluster through nemo-run, follow it, and raise if a rank fails."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
