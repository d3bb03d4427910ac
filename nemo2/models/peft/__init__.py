# SPDX-License-Identifier: Apache-2.0
"""Parameter-efficient fine-tuning: LoRA, DoRA, canonical LoRA, and the base class of your own methods."""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)
