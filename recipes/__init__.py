# SPDX-License-Identifier: Apache-2.0
"""The recipes: one module of facts each, loaded when it is asked for.

A file here is a recipe (``llama3_8b.py``); a folder holds the factories that recipes share, under NeMo 2.0's paths
(``precision.mixed_precision``, ``optim.adam``, ``log.default``), and ``_factories`` says which of them overrides find by
name. Listing reads facts and imports neither torch nor nemo-run. Recipes of a user's own, in files and packages outside, are
found by name or path too.
"""

from nemo2.config.announced import announce
from nemo2.lazy import front_door

if __name__ != "nemo2.recipes":
    raise ImportError("This folder is installed as `nemo2.recipes`: write `from nemo2.recipes import llama3_8b`.")

from nemo2.recipes._find import get as get
from nemo2.recipes._find import own as own
from nemo2.recipes._shipped import names

announce(f"{__name__}._factories")
__getattr__, __dir__, _ = front_door(__name__, __file__, modules=names())
__all__ = names()  # pyright: ignore[reportUnsupportedDunderAll]
