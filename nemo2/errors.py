# SPDX-License-Identifier: Apache-2.0
"""The errors that nemo2 raises, for scripts that catch them: the classes of `nemo2.base.errors`."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)
