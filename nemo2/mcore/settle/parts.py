# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of a recipe that are only settings, with their derived values and their constructors' errors.

These parts are a model's configuration, the strategy, the precision, the optimizer's configuration, the schedule, the
checkpoint callback, and the data module without its tokenizer. None of them opens a file or a connection, or creates a
process group.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import fiddle as fdl

from nemo2.base.backend.extras import has
from nemo2.base.backend.te_version import megatron_finds
from nemo2.base.errors import ConfigError, message_of
from nemo2.config.arguments import missing_arguments
from nemo2.config.tree import Config
from nemo2.config.walk import class_of, node_at, peft_of
from nemo2.mcore.settle.machine import Machine

RULE_OF = {
    "model.config": "megatron-core-agrees",
    "trainer.strategy": "strategy-settings-are-supported",
    "trainer.plugins": "precision-is-known",
    "optim.config": "megatron-core-agrees",
    "optim.lr_scheduler": "schedule-is-one-curve",
    "log.ckpt": "checkpoint-settings-are-supported",
    "data": "data-module-accepts-its-arguments",
    "peft": "peft-settings-are-in-range",
}
"""The paths of the parts in a recipe (of the precision and the PEFT method: their usual one), and the rule of a
constructor's error that names no other rule."""


class Refusal(NamedTuple):
    """A refusal by the run."""

    rule: str
    """The id of the rule (`nemo2.preflight.checks`)."""
    message: str
    """The text of the error."""
    path: str = ""
    """The part of the recipe. Empty: the whole recipe."""
    cause: Optional[BaseException] = None
    """The exception. None: no exception was raised."""

    @property
    def sentence(self) -> str:
        """The message, preceded by the part if the message names none."""
        if self.path == "model.config":
            return f"model.config: Megatron-Core rejects it: {self.message}"
        words = self.path, f"{self.path.rpartition('.')[2]}.", f"{self.path.partition('.')[0]}."
        return self.message if any(word in self.message for word in words) else f"{self.path}: {self.message}"


def refusals_of(error: Exception, rule: str, path: str = "") -> list[Refusal]:
    """The refusals in an error, under the error's own rule or else under ``rule``. A `ConfigError` has a paragraph
    for each."""
    cause = error.args[0] if error.args and isinstance(error.args[0], BaseException) else error  # fiddle wraps it
    text = message_of(cause).strip() or type(cause).__name__
    paragraphs = text.splitlines() if isinstance(cause, ConfigError) else [text]
    rules = getattr(cause, "rules", None) or [getattr(cause, "rule", None) or rule] * len(paragraphs)
    return [
        Refusal(one, " ".join(paragraph.split()), path, cause) for one, paragraph in zip(rules, paragraphs, strict=True)
    ]


@dataclass(frozen=True)
class Parts:
    """The built parts of a recipe by path, and the refusals of the parts that failed."""

    objects: dict[str, Any] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    precision_at: str = "trainer.plugins"
    """The path of the precision: the plugin's, or `trainer.precision`."""
    peft_at: str = "peft"
    """The path of the PEFT method, which may stand where any transform does."""

    def get(self, path: str) -> Any:
        """The built part. None: it failed, or it doesn't exist."""
        return self.objects.get(path)


def build_parts(recipe: Any, machine: Machine) -> Parts:
    """Build each part separately, so that a part that fails does not hide the next. The recipe is not changed."""
    objects: dict[str, Any] = {}
    refusals: list[Refusal] = []
    elsewhere = {"trainer.plugins": precision_of(getattr(recipe, "trainer", None)), "peft": peft_of(recipe)}
    for path in RULE_OF:
        place, node = elsewhere.get(path) or (path, node_at(recipe, path))
        if missing := missing_arguments(node, place):
            refusals.append(Refusal(RULE_OF[path], f"{missing}.", place))
            continue
        try:
            with quietly(), megatron_finds(machine.transformer_engine):
                built = _build(_without_tokenizer(node) if path == "data" else node, path, machine)
        except Exception as error:  # Megatron-Core asserts, raises ValueError, TypeError ...: all say that it won't do
            refusals += refusals_of(error, RULE_OF[path], path if path == "trainer.plugins" else place)
        else:
            if built is not None:
                objects[path] = built
    return Parts(objects, tuple(refusals), elsewhere["trainer.plugins"][0], elsewhere["peft"][0])


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings, because these objects are only inspected, not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _build(node: Any, path: str, machine: Machine) -> Any:
    """The object of a config, or a copy of a live object, so that settling does not change the recipe."""
    if not isinstance(node, fdl.Config):
        return copy.deepcopy(node) if path.startswith(("trainer.", "model.", "optim.config")) else copy.copy(node)
    # Megatron-Core looks for the package that keeps states in low precision. Its absence here says nothing about another
    # machine.
    elsewhere = path == "optim.config" and machine.transformer_engine is not None and not has("transformer_engine")
    if not elsewhere:
        return fdl.build(node)
    from nemo2.base.backend.te_stub import transformer_engine_stub

    with transformer_engine_stub():
        return fdl.build(node)


def precision_of(trainer: Any) -> tuple[str, Any]:
    """The precision of a trainer, as a plugin (a config or a live object), and its path: among the plugins (one or a list),
    or `trainer.precision`, which is short for a plugin with a strategy of nemo2."""
    from nemo2.mcore.precision import MegatronMixedPrecision

    plugins = getattr(trainer, "plugins", None)
    if plugins is not None and not isinstance(plugins, list | tuple):
        return "trainer.plugins", plugins
    for index, one in enumerate(plugins or ()):
        plugin = class_of(one)
        if isinstance(plugin, type) and issubclass(plugin, MegatronMixedPrecision):
            return f"trainer.plugins[{index}]", one
    strategy = getattr(class_of(getattr(trainer, "strategy", None)), "__mro__", ())
    short = getattr(trainer, "precision", None) if isinstance(trainer, fdl.Buildable) else None
    if short is not None and any(one.__module__.startswith("nemo2.") for one in strategy):
        return "trainer.precision", Config(MegatronMixedPrecision, precision=short)
    return "trainer.plugins", None


def _without_tokenizer(data: Any) -> Any:
    """The data module without its tokenizer. Only tokenizers read files before a data module is set up."""
    if not isinstance(data, fdl.Config):
        return data
    data = copy.copy(data)
    if "tokenizer" in data.__arguments__:
        data.tokenizer = None
    return data
