# SPDX-License-Identifier: Apache-2.0
"""The families of models with a conversion, and the choice of the family for a configuration."""

import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.models.conversion import tables
from nemo2.models.conversion.nearest import nearest_family, suggested_architecture
from nemo2.models.conversion.table import Conversion

_LISTED = 'The page "Hugging Face" of nemo2\'s documentation lists the families that have one.'


@functools.cache
def families() -> tuple[Conversion, ...]:
    """Every `Conversion` of a module of ``tables``, so that a family's file is enough. A family with several has the one that
    exports use first."""
    conversions: dict[int, Conversion] = {}
    for module in pkgutil.iter_modules(tables.__path__):
        values = vars(importlib.import_module(f"{tables.__name__}.{module.name}")).values()
        conversions |= {id(value): value for value in values if isinstance(value, Conversion)}
    return tuple(conversions.values())


def conversion_of(config: Any, architectures: Sequence[str] = ()) -> Conversion:
    """The conversion of a nemo2 configuration. A family's own class takes precedence over its base class.

    If a family has several conversions (ChatGLM: its own names, and as a GLM), the one for any of ``architectures``, or
    else the first.

    Raises:
        ConfigError: no family has the configuration.
    """
    for kind in type(config).__mro__:
        matches = [family for family in families() if kind in family.configs]
        if matches:
            return next((family for family in matches if set(architectures) & set(family.architectures)), matches[0])
    raise ConfigError(
        f"model.config={type(config).__name__}: nemo2 has no conversion between this model and Hugging Face. {_LISTED}"
    )


def conversion_for(released: Mapping[str, Any], *, file: str | Path = "config.json") -> Conversion:
    """The conversion for a config.json. ``file`` is the name in errors.

    Raises:
        ConfigError: the architecture is unknown or missing, or isn't a list of names.
    """
    names = released.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f'{file} has architectures={names!r}: it must be a list of names, for example ["LlamaForCausalLM"].'
        )
    if (conversion := conversion_named(released)) is not None:
        return conversion
    if not names:
        raise ConfigError(
            f'{file} has no architectures, which names the kind of model: add it, for example "architectures": '
            '["LlamaForCausalLM"].'
        )
    known = list(dict.fromkeys(name for family in families() for name in family.architectures))
    raise ConfigError(
        f"{file} has architectures={names}, for which nemo2 has no conversion"
        f"{suggested_architecture(names[0], released.get('model_type'), known)} {nearest_family(released, families())} "
        f"{_LISTED}"
    )


def conversion_named(released: Mapping[str, Any]) -> Optional[Conversion]:
    """The conversion for the first known name under "architectures" in a config.json. None: no name is known."""
    text = released.get("text_config")
    kind = (text if isinstance(text, Mapping) else released).get("model_type")
    for name in released.get("architectures") or []:
        of_the_name = [family for family in families() if name in family.architectures]
        own = [family for family in of_the_name if kind in family.text_types]
        if matches := own or [family for family in of_the_name if not family.text_types]:
            return matches[0]
    return None


def modules_with_weights(config: Any) -> Optional[list[str]]:
    """The full names of all modules with weights, as in plain layers. Names of routed experts don't include the expert's
    number. None: no family has the model."""
    try:
        rows = conversion_of(config).rows(config)
    except ConfigError:
        return None
    modules = []
    for row in rows:
        layers = range(config.num_layers) if row.layers is None else row.layers
        keys = [row.key.replace("*", str(layer), 1) for layer in layers] if "*" in row.key else [row.key]
        modules += [module_of_key(key) for key in keys]
    return list(dict.fromkeys(modules))
