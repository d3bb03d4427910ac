# SPDX-License-Identifier: Apache-2.0
"""Why a setting of a recipe is what it is: who set it, what overruled whom, and what runs in the end."""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if TYPE_CHECKING:
    from nemo2.explain.effective import Effective as Effective
    from nemo2.explain.effective import settle_recipe as settle_recipe
    from nemo2.explain.fields import Explanation as Explanation
    from nemo2.explain.fields import explain as explain
    from nemo2.explain.fields import explain_all as explain_all

_HOMES = {
    "Effective": "nemo2.explain.effective",
    "Explanation": "nemo2.explain.fields",
    "explain": "nemo2.explain.fields",
    "explain_all": "nemo2.explain.fields",
    "settle_recipe": "nemo2.explain.effective",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
