# SPDX-License-Identifier: Apache-2.0
"""``from nemo2 import llm``: everything that a training script names, imported on first use.

The package offers the entry points (`pretrain`, `finetune`, `validate`, `generate`), models and their sizes, data
modules, and every recipe by name (``llm.llama3_8b.pretrain_recipe()``).
"""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__, fallback="nemo2.from_nemo.modules:in_llm")  # pyright: ignore[reportUnsupportedDunderAll]
