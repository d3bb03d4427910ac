# SPDX-License-Identifier: Apache-2.0
"""Data: tokenizers, tokenization of text files, data modules, and the sampler that turns samples into steps.

Names are imported on first use, so importing the package imports neither torch nor Megatron-Core.
"""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
