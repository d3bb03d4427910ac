# SPDX-License-Identifier: Apache-2.0
"""The families of models with a conversion, and the choice of the family for a configuration."""

import difflib
import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from nemo2.errors import ConfigError
from nemo2.models.conversion.settings import text_config
from nemo2.models.conversion.table import Conversion
from nemo2.names import did_you_mean
from nemo2.parallel.norm_names import module_of_key


@functools.cache
def families() -> tuple[Conversion, ...]:
    """Every `Conversion` of a module of ``nemo2.models``, so that a family's file is enough. A family with several has the one
    that exports use first."""
    conversions: dict[int, Conversion] = {}
    for module in pkgutil.iter_modules(importlib.import_module("nemo2.models").__path__):
        if not module.ispkg:
            values = vars(importlib.import_module(f"nemo2.models.{module.name}")).values()
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
    names = sorted(kind.__name__ for family in families() for kind in family.configs)
    raise ConfigError(
        f"model.config={type(config).__name__}: nemo2 has no conversion between this model and Hugging Face. Conversions exist "
        f"for {', '.join(names)} and their subclasses."
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
    raise ConfigError(
        f"{file} has architectures={names}, for which nemo2 has no conversion{_did_you_mean(names[0])} {_nearest(released)} "
        f"Conversions exist for {', '.join(dict.fromkeys(name for family in families() for name in family.architectures))}."
    )


class _Fields(dict[str, Any]):
    """A config.json that remembers which of its fields were asked for."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


_NOT_OF_THE_MODEL = re.compile(
    r"_token_id|dtype|^use_cache$|^transformers_|auto_map|^pretraining_tp$|^output_|_implementation$|^_|id2label|label2id|^return_dict$"
)


def _read_by(family: Conversion, config_json: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """The fields that a family reads of a config.json, and those of them whose values it refuses."""
    read: set[str] = set()
    refused: list[str] = []
    while True:
        fields = _Fields({name: value for name, value in config_json.items() if name not in refused})
        try:
            family.config(fields)
            return read | fields.read, refused
        except Exception as error:  # of a family whose fields these aren't
            read |= fields.read
            named = re.search(r"has (\w+)=", str(error)) if isinstance(error, ConfigError) else None
            if named is None or named[1] not in [*fields]:
                return read, refused
            refused.append(named[1])


def _nearest(released: Mapping[str, Any]) -> str:
    """The family whose settings are most of this config.json's, and the fields that the family doesn't have."""
    config_json = {
        name: value for name, value in text_config(released).items() if name not in ("model_type", "architectures")
    }
    own = {
        name for name, value in config_json.items() if value not in (None, False) and not _NOT_OF_THE_MODEL.search(name)
    }
    candidates: list[tuple[tuple[int, int], str, list[str], list[str]]] = []
    for family in families():
        read, refused = _read_by(family, config_json)
        others = sorted(own - read - {*refused})
        apart = len(others) + len(refused), len(read - config_json.keys())
        candidates.append(
            (apart, family.architectures[0], others, [f"{name}={config_json[name]!r}" for name in refused])
        )
    _, name, others, values = min(candidates)
    differences = [f"it lacks the field{'s'[: len(others) - 1]} {', '.join(others)}"] if others else []
    differences += [f"it doesn't support {', '.join(values)}"] if values else []
    sentence = (
        " and ".join(differences) or "it has all of the fields, so the layers differ where config.json doesn't say so"
    )
    return f"The nearest family is {name}: {sentence}."


def _did_you_mean(name: str) -> str:
    """A suggestion for a misspelled architecture. The names of most differ in a few letters only, so those of the model, before
    "For", must be alike, and a model of another generation is another model."""
    alike = []
    for known in (one for family in families() for one in family.architectures):
        models = name.partition("For")[0].lower(), known.partition("For")[0].lower()
        generations = [re.sub(r"\D", "", model) for model in models]
        if generations[0] == generations[1] and difflib.SequenceMatcher(None, *models).ratio() >= 0.75:
            alike.append(known)
    return did_you_mean(name, alike) or "."


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
