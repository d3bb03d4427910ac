# SPDX-License-Identifier: Apache-2.0
"""Turns a refusal of the installed Megatron-Core into one with a field, its value, its place, and a value that it accepts.

Megatron-Core's configurations check themselves when they are made, and again with the sizes of a layout, without a GPU or
a process group (`nemo2.mcore.settle`). What they say states a requirement, but not always the setting to change. So
this module changes one setting of the recipe at a time, those first that the message names and that the user set, and
asks again.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fiddle as fdl

import nemo2
from nemo2.base.counts import is_count
from nemo2.base.errors import message_of
from nemo2.base.names import sentence
from nemo2.config.aliases import decided_elsewhere, parameter_names
from nemo2.config.derivations import Setting
from nemo2.config.walk import node_at, set_at, who_set
from nemo2.preflight.checks.facts import Facts, read_facts
from nemo2.preflight.checks.rule import Rule

AGREES = "megatron-core-agrees"
MOST_ROUNDS = 5
"""The most refusals to look behind, because Megatron-Core stops at its first."""
MOST_CHANGES = 3
FURTHEST = 6
"""How far from a number of the recipe its neighbours are tried."""
_OWN = str(Path(nemo2.__file__).parent)
Refused = Callable[[Facts], list[str]]
_PATHS = ("model.config", "strategy", "trainer.plugins", "optim.config", "strategy.ddp_config")


def refused(facts: Facts) -> list[str]:
    """What the installed Megatron-Core refuses of the recipe in its layout, in its own words."""
    causes = (refusal.cause for refusal in facts.settled.refusals if refusal.rule == AGREES)
    words = (message_of(cause.__cause__ or cause) if cause else "" for cause in causes)
    return list(dict.fromkeys(" ".join(text.split()) for text in words))


def refusals(
    facts: Facts, others: Sequence[Rule], *, refused: Refused = refused, only_of_user: bool = False
) -> Iterator[str]:
    """Messages for the settings that the installed Megatron-Core refuses, also for those behind its first refusal.

    Args:
        others: Rules that no offered change may break.
        refused: What Megatron-Core refuses of a recipe, in its own words.
        only_of_user: Only change what the user set or Megatron-Core names, where ``refused`` takes its time.
    """
    for _ in range(MOST_ROUNDS):
        if not (reasons := refused(facts)):
            return
        changes = _accepted_changes(facts, reasons[0], others, refused, only_of_user=only_of_user)
        yield _message(facts, reasons[0], [setting for setting, _ in changes])
        if not changes:
            return
        facts = changes[0][1]


def _accepted_changes(
    facts: Facts, reason: str, others: Sequence[Rule], refused: Refused, *, only_of_user: bool
) -> list[tuple[Setting, Facts]]:
    """Single changes with which Megatron-Core accepts the recipe, or with which it at least doesn't say this."""
    accepted: list[tuple[Setting, Facts]] = []
    further: list[tuple[Setting, Facts]] = []
    changed_by_user, broken = False, _broken_rules(facts, others)
    for setting in _settings(facts, reason):
        by_user = _by_user(facts, setting)
        # Of a recipe's settings, only those of the layout and switches are alternatives: its sizes are another model.
        alternative = _is_named(setting.name, reason) and (
            setting.owner == "strategy" or isinstance(setting.value, bool)
        )
        if len(accepted) == MOST_CHANGES:
            break
        if accepted and changed_by_user and not (by_user or alternative):
            continue
        if only_of_user and not (by_user or _is_named(setting.name, reason)):
            continue
        for changed in _other_values(facts, setting, reason):
            recipe = copy.deepcopy(facts.recipe)
            setattr(node_at(recipe, changed.owner), changed.name, changed.value)
            after = read_facts(
                recipe, devices=facts.devices, nodes=facts.nodes, machine=facts.machine, environment=facts.environment
            )
            now = refused(after)
            if after.config is not None and not now and _broken_rules(after, others) <= broken:
                accepted.append((changed, after))
                changed_by_user |= by_user
                break
            if reason not in now:
                further.append((changed, after))
    return accepted or further[:1]


def _broken_rules(facts: Facts, others: Sequence[Rule]) -> set[str]:
    """The other rules that a recipe breaks. A change that breaks one more doesn't help, and may only hide the refusal."""
    broken = {rule.name for rule in others if facts.has_layout and _is_broken(rule, facts)}
    return broken | {refusal.rule for refusal in facts.settled.refusals if refusal.rule != AGREES}


def _is_broken(rule: Rule, facts: Facts) -> bool:
    try:
        return any(rule.find(facts))
    except (ArithmeticError, LookupError, TypeError, ValueError):  # of a value that an earlier rule refuses
        return True


def _settings(facts: Facts, reason: str) -> list[Setting]:
    """The settings of the recipe, and those that the message names: first those that the user set, and of these and of the
    others first those that it names."""
    settings = [
        Setting(str(name), path, value)
        for path in _PATHS
        if isinstance(node := node_at(facts.recipe, path), fdl.Buildable)
        for name in parameter_names(node.__fn_or_cls__)
        if name in node.__arguments__ or (_is_named(name, reason) and not decided_elsewhere(node.__fn_or_cls__, name))
        if not isinstance(value := getattr(node, name, None), fdl.Buildable)
    ]
    return sorted(settings, key=lambda one: (not _by_user(facts, one), not _is_named(one.name, reason)))


def _other_values(facts: Facts, setting: Setting, reason: str) -> Iterator[Setting]:
    """The default of a setting. If the message names it, also the other value of a switch, and a number's nearest numbers."""
    if _is_named(setting.name, reason):
        if isinstance(setting.value, bool):
            yield setting._replace(value=not setting.value)
        elif is_count(setting.value):
            near = (setting.value + sign * step for step in range(1, FURTHEST + 1) for sign in (-1, 1))
            yield from (setting._replace(value=value) for value in near if value >= 1)
    node = copy.copy(node_at(facts.recipe, setting.owner))
    if setting.name in node.__arguments__:
        delattr(node, setting.name)
    if (default := getattr(node, setting.name, None)) != setting.value:
        yield setting._replace(value=default)


def _by_user(facts: Facts, setting: Setting) -> bool:
    setters = who_set(node_at(facts.recipe, setting.owner), setting.name)
    return bool(setters) and not setters[-1][0].startswith(_OWN)


def _is_named(field: str, reason: str) -> bool:
    """Whether a message names a field, or says it in words: ``without tensor parallelism``, ``precision-aware optimizer``."""
    words = re.sub(r"_model(?=_parallel)|_size$|^use_", "", field).replace("_", " ")
    return f" {words}" in f" {' '.join(re.findall('[a-z0-9]+', reason.lower()))}"


def _message(facts: Facts, reason: str, accepted: list[Setting]) -> str:
    rejects = (
        f"Megatron-Core {facts.machine.megatron_core} rejects the model in this layout ({facts.layout.describe()})"
    )
    if not accepted:
        named = [
            f"model.config.{name}={getattr(facts.model, name)!r}"
            for name in sorted(set(re.findall(r"\w+", reason)))
            if hasattr(facts.model, name)
        ]
        return f"{', '.join(named) or 'model.config'}: {rejects}: {sentence(reason)}"
    first = accepted[0]
    node = node_at(facts.recipe, first.owner)
    place = set_at(node, first.name) if _by_user(facts, first) else ""
    return (
        f"{first._replace(value=getattr(node, first.name))}{place}: {rejects}: {sentence(reason)} "
        f"It accepts {', or '.join(map(str, accepted))}."
    )
