# SPDX-License-Identifier: Apache-2.0
"""The families of models with a conversion, and the choice of the family for a configuration."""

import difflib
import functools
import importlib
import pkgutil
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean, listed, shortened
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.models.conversion import tables
from nemo2.models.conversion.settings import text_config
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


_NOT_OF_THE_MODEL = re.compile(
    r"_token_id|dtype|^use_cache$|^transformers_|auto_map|^pretraining_tp$|^output_|_implementation$|^_|id2label|label2id|^return_dict$"
    r"|^num_logits_to_keep$|_dropout$|initializer"
)
_KINDS = {
    "attention": re.compile("num_attention_heads|^n_head$"),
    "experts": re.compile("expert|moe"),
    "latent attention": re.compile("kv_lora_rank|q_lora_rank"),
    "Mamba mixers": re.compile("mamba|ssm|^time_step"),
    "linear attention": re.compile("^linear_(conv|key|value|num|attn)"),
}
"""Kinds of layers by the names of their fields."""
_NAMED = re.compile(r"has (no )?(\w+)[=,]")
"""The field in the errors of `settings`: one that is missing, or one with a value that a family refuses."""
_SIZE = 8
_STAND_INS: dict[str, Any] = {"layers_block_type": ["mlp"]}
"""In place of a missing field or of a value that is refused, so that a family reads the other fields too. Others are sizes."""
_SHOWN = 6
_MOST_DIFFERENT = 1 / 3
"""Of the fields of a file with plain layers. Beyond it, a family's layers have little to do with the file's."""


class _Fields(dict[str, Any]):
    """A config.json that remembers which of its fields were read."""

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


@dataclass(frozen=True)
class _Reading:
    """What a family makes of a config.json: the fields that it reads, refuses, and misses."""

    family: Conversion
    read: set[str]
    refused: list[str]
    missing: list[str]

    @property
    def kinds(self) -> set[str]:
        hybrid = {"Mamba mixers"} if hasattr(self.family.configs[0], "hybrid_override_pattern") else set()
        return _kinds_in(self.read) | hybrid


def nearest_family(released: Mapping[str, Any], families: Sequence[Conversion]) -> str:
    """A sentence with the nearest family's architecture and what differs, or with the fields that no family has."""
    model_type = str(released.get("model_type"))
    config_json = {
        name: value for name, value in text_config(released).items() if name not in ("model_type", "architectures")
    }
    own = {
        name for name, value in config_json.items() if value not in (None, False) and not _NOT_OF_THE_MODEL.search(name)
    }

    def distance(reading: _Reading) -> tuple[int, int, float, int]:
        fields = len(own - reading.read - {*reading.refused}) + len(reading.refused) + len(reading.missing)
        alike = difflib.SequenceMatcher(None, model_type, _stem(reading.family.architectures[0])).ratio()
        return len(reading.kinds ^ _kinds_in(own)), fields, -alike, len(reading.read - config_json.keys())

    with warnings.catch_warnings(action="ignore"):  # of configurations with stand-ins
        readings = [_reading(family, config_json) for family in families]
    nearest = min(readings, key=distance)
    apart, fields, *_ = distance(nearest)
    if apart or (_kinds_in(own) <= {"attention"} and fields > _MOST_DIFFERENT * len(own)):
        unknown = sorted(own.difference(*(reading.read for reading in readings)))
        return (
            f"No family is near: {f'none has {listed(unknown, _SHOWN)}' if unknown else 'none has all of its fields'}."
        )
    unread = sorted(own - nearest.read - {*nearest.refused})
    differences = [f"it lacks the field{'s'[: len(unread) - 1]} {listed(unread, _SHOWN)}"] if unread else []
    values = [f"{name}={shortened(repr(config_json[name]))}" for name in nearest.refused]
    differences += [f"it doesn't support {listed(values, _SHOWN)}"] if values else []
    differences += [f"it needs {listed(nearest.missing, _SHOWN)}"] if nearest.missing else []
    sentence = (
        " and ".join(differences) or "it has all of the fields, so the layers differ where config.json doesn't say so"
    )
    return f"The nearest family is {nearest.family.architectures[0]}: {sentence}."


def suggested_architecture(name: str, model_type: Any, architectures: Sequence[str]) -> str:
    """A suggestion for a misspelled architecture. The names of most differ in a few letters only, so those of the model, before
    "For", must be alike, and a model of another generation is another model. Nor is a name misspelled that is also the
    file's ``model_type``."""
    stem, alike = _stem(name), []
    if stem != re.sub("[^a-z0-9]", "", str(model_type).lower()):
        for known in architectures:
            generations = [re.sub(r"\D", "", one) for one in (stem, _stem(known))]
            if generations[0] == generations[1] and difflib.SequenceMatcher(None, stem, _stem(known)).ratio() >= 0.75:
                alike.append(known)
    return did_you_mean(name, alike) or "."


def _reading(family: Conversion, config_json: Mapping[str, Any]) -> _Reading:
    read: set[str] = set()
    refused: list[str] = []
    missing: list[str] = []
    while True:
        stand_ins = {name: _STAND_INS.get(name, _SIZE) for name in missing}
        stand_ins |= {name: _STAND_INS[name] for name in refused if name in _STAND_INS}
        fields = _Fields({**{n: v for n, v in config_json.items() if n not in refused}, **stand_ins})
        try:
            family.config(fields)
            return _Reading(family, read | fields.read, refused, missing)
        except Exception as error:  # of a family whose fields these aren't
            read |= fields.read
            named = _NAMED.search(str(error)) if isinstance(error, ConfigError) else None
            if named is None or named[2] in (*refused, *missing):
                return _Reading(family, read, refused, missing)
            (refused if named[2] in config_json and not named[1] else missing).append(named[2])


def _kinds_in(names: set[str]) -> set[str]:
    return {kind for kind, pattern in _KINDS.items() if any(pattern.search(name) for name in names)}


def _stem(architecture: str) -> str:
    return architecture.partition("For")[0].lower()
