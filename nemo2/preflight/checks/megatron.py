# SPDX-License-Identifier: Apache-2.0
"""Turns a refusal of the installed Megatron-Core into one with a field, its value, its place, and a value that it accepts.

Megatron-Core's configurations check themselves when they are made, and again with the sizes of a layout, without a GPU or
a process group (`nemo2.mcore.settle`). What they say states a requirement, but not always the setting to change. So
this module changes one setting of the recipe at a time, those first that the message names and that the user set, and
asks again.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import fiddle as fdl

import nemo2
from nemo2.base.counts import is_count
from nemo2.config.derivations import Setting
from nemo2.config.walk import place_of, who_set
from nemo2.mcore.parallel.layout import SIZE_FIELDS
from nemo2.mcore.settle.parts import node_at
from nemo2.preflight.checks.facts import Facts, read_facts

AGREES = "megatron-core-agrees"
MOST_ROUNDS = 5
"""The most refusals to look behind, because Megatron-Core stops at its first."""
MOST_CHANGES = 3
FURTHEST = 6
"""How far from a number of the recipe its neighbours are tried."""
_OWN = str(Path(nemo2.__file__).parent)
_PATHS = ("model.config", "strategy", "trainer.plugins", "optim.config", "strategy.ddp_config")


def refused(facts: Facts) -> list[str]:
    """What the installed Megatron-Core refuses of the recipe in its layout, in its own words."""
    causes = (refusal.cause for refusal in facts.settled.refusals if refusal.rule == AGREES)
    words = (str((cause.__cause__ or cause) if cause else "").partition("\n\nFiddle context:")[0] for cause in causes)
    return list(dict.fromkeys(" ".join(text.split()) for text in words))


def refusals(facts: Facts) -> Iterator[str]:
    """Messages for the settings that the installed Megatron-Core refuses, also for those behind its first refusal."""
    for _ in range(MOST_ROUNDS):
        if not (reasons := refused(facts)):
            return
        changes = _accepted_changes(facts, reasons[0])
        yield _message(facts, reasons[0], [setting for setting, _ in changes])
        if not changes:
            return
        facts = changes[0][1]


def _accepted_changes(facts: Facts, reason: str) -> list[tuple[Setting, Facts]]:
    """Single changes with which Megatron-Core accepts the recipe, or with which it at least doesn't say this."""
    accepted: list[tuple[Setting, Facts]] = []
    others: list[tuple[Setting, Facts]] = []
    changed_by_user, names = False, _names(reason)
    for setting in _settings(facts, names):
        by_user = _by_user(facts, setting)
        unrelated = not by_user and setting.name not in names
        if len(accepted) == MOST_CHANGES or (accepted and changed_by_user and unrelated):
            break
        for changed in _other_values(facts, setting, names):
            recipe = copy.deepcopy(facts.recipe)
            setattr(node_at(recipe, changed.owner), changed.name, changed.value)
            after = read_facts(recipe, machine=facts.machine, environment=facts.environment)
            now = refused(after)
            if after.config is not None and not now and not after.layout.world_problem(after.world_size):
                accepted.append((changed, after))
                changed_by_user |= by_user
                break
            if reason not in now:
                others.append((changed, after))
    return accepted or others[:1]


def _settings(facts: Facts, names: set[str]) -> list[Setting]:
    """The settings of the recipe: those first that the user set, and of these and of the others those with ``names``."""
    settings = [
        Setting(str(name), path, value)
        for path in _PATHS
        if isinstance(node := node_at(facts.recipe, path), fdl.Buildable)
        for name, value in node.__arguments__.items()
        if not isinstance(value, fdl.Buildable)
    ]
    return sorted(settings, key=lambda one: (not _by_user(facts, one), one.name not in names))


def _other_values(facts: Facts, setting: Setting, names: set[str]) -> Iterator[Setting]:
    """The default of a setting, and for a number with one of ``names`` the nearest numbers."""
    if is_count(setting.value) and setting.name in names:
        near = (setting.value + sign * step for step in range(1, FURTHEST + 1) for sign in (-1, 1))
        yield from (setting._replace(value=value) for value in near if value >= 1)
    node = copy.copy(node_at(facts.recipe, setting.owner))
    delattr(node, setting.name)
    if (default := getattr(node, setting.name, None)) != setting.value:
        yield setting._replace(value=default)


def _by_user(facts: Facts, setting: Setting) -> bool:
    setters = who_set(node_at(facts.recipe, setting.owner), setting.name)
    return bool(setters) and not setters[-1][0].startswith(_OWN)


def _names(reason: str) -> set[str]:
    """The fields in a message: their names, and those of parallel sizes in words ("without tensor parallelism")."""
    sizes = {name: name.removesuffix("_size").replace("_model", "").replace("_", " ") for name in SIZE_FIELDS.values()}
    return {*re.findall(r"\w+", reason), *(name for name, words in sizes.items() if words in reason.lower())}


def _message(facts: Facts, reason: str, accepted: list[Setting]) -> str:
    sentence = reason if reason.endswith((".", "!", "?")) else f"{reason}."
    rejects = (
        f"Megatron-Core {facts.machine.megatron_core} rejects the model in this layout ({facts.layout.describe()})"
    )
    if not accepted:
        named = [
            f"model.config.{name}={getattr(facts.model, name)!r}"
            for name in sorted(_names(reason))
            if hasattr(facts.model, name)
        ]
        return f"{', '.join(named) or 'model.config'}: {rejects}: {sentence}"
    first = accepted[0]
    node = node_at(facts.recipe, first.owner)
    place = f" (set at {place_of(node, first.name)})" if _by_user(facts, first) else ""
    return (
        f"{first._replace(value=getattr(node, first.name))}{place}: {rejects}: {sentence} "
        f"It accepts {', or '.join(map(str, accepted))}."
    )
