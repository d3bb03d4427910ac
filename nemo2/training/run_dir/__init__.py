# SPDX-License-Identifier: Apache-2.0
"""The files that a run writes about itself. Names are resolved on first use; reading a run's files needs no torch."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
