# SPDX-License-Identifier: Apache-2.0
"""Model families: one file each, with its sizes, its LightningModule and the source of every number."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
