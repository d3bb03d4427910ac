# SPDX-License-Identifier: Apache-2.0
from nemo2.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)
