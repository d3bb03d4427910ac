# SPDX-License-Identifier: Apache-2.0
"""The recipes: one module of facts each, imported on first use.

A file here is a recipe (``llama3_8b.py``). A folder holds factories that recipes share, under NeMo 2.0's paths
(``precision.mixed_precision``, ``optim.adam``, ``log.default``). ``_factories`` lists the factories that overrides find
by name. Listing recipes reads facts and imports neither torch nor nemo-run. Your own recipes, in files and packages
elsewhere, are also found by name or path.
"""

from nemo2.base.lazy import front_door
from nemo2.config.announced import announce

if __name__ != "nemo2.recipes":
    raise ImportError("This folder is installed as `nemo2.recipes`: write `from nemo2.recipes import llama3_8b`.")

from nemo2.recipes._find import get as get
from nemo2.recipes._find import own as own
from nemo2.recipes._shipped import names

announce(f"{__name__}._factories")
__getattr__, __dir__, _ = front_door(__name__, __file__, modules=names(), fallback="nemo2.from_nemo.modules:in_recipes")
__all__ = names()  # pyright: ignore[reportUnsupportedDunderAll]
