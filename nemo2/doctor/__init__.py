# SPDX-License-Identifier: Apache-2.0
"""The examination of an installation: missing packages and their cost, versions that break, what this machine can run."""

from nemo2.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
