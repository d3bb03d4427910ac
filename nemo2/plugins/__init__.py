# SPDX-License-Identifier: Apache-2.0
"""The plugins of `nemo2.launch.plugins`, where a NeMo 2.0 script expects them."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)
