# SPDX-License-Identifier: Apache-2.0
"""The recipe tree: configs that can be edited, printed, compared, sent to another machine and built.

Importing `configurable` is cheap. Names that need fiddle and nemo-run are imported on first use.
"""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
