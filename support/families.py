# SPDX-License-Identifier: Apache-2.0
"""The sizes of the families of models, as their modules have them, so that tests need no list of them."""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def named_sizes() -> dict[str, Any]:
    """Every configuration that has the sizes of a model, as "family:name"."""
    from nemo2.config.capture import is_configurable
    from nemo2.models.conversion.families import families

    sizes = {}
    for path in sorted({kind.__module__ for family in families() for kind in family.configs}):
        for name, kind in vars(import_module(path)).items():
            if not (isinstance(kind, type) and kind.__module__ == path and is_configurable(kind)):
                continue
            # The base class of a family's sizes is no model: it lacks a width, or says how wide experts are and not how many.
            if getattr(kind, "hidden_size", 0) and (kind.num_moe_experts or not kind.moe_ffn_hidden_size):  # pyright: ignore[reportAttributeAccessIssue]
                sizes[f"{path.removeprefix('nemo2.models.')}:{name}"] = kind
    return sizes


def small_and_unlike() -> dict[str, Any]:
    """`named_sizes`, made small in the numbers and left alone in kind; of those that become alike, the first."""
    from nemo2.models.walker import shape_of
    from nemo2.preflight.rehearse.shrink import small_sizes

    configs, seen = {}, set()
    for key, kind in named_sizes().items():
        config = kind(**small_sizes(kind()) | {"vocab_size": 512})
        if (alike := (kind.__module__, shape_of(config))) not in seen:
            configs[key] = config
        seen.add(alike)
    return configs
