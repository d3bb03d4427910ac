# SPDX-License-Identifier: Apache-2.0
"""Names the family that is nearest to a config.json of an unknown architecture, and what differs.

Each family reads the file as its own. The nearest has the same kinds of layers, and the fewest fields that it doesn't read, whose
values it refuses, or that the file lacks.
"""

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean, listed, shortened
from nemo2.models.conversion.settings import text_config
from nemo2.models.conversion.table import Conversion

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
