# SPDX-License-Identifier: Apache-2.0
"""Checks a recipe against all rules before anything runs, and reports every broken rule at once, with its arithmetic.

`check_recipe` raises, `find_problems` lists. `table.RULES` is the table that both use, and the documentation too. No process
group is created. Files are not opened, except to see that they exist.
"""

from nemo2.base.lazy import front_door

__getattr__, __dir__, __all__ = front_door(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
