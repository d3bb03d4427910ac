# SPDX-License-Identifier: Apache-2.0
"""``nemo2 check``: checks whether a recipe can run, before anything starts."""

import sys
from dataclasses import asdict
from typing import Annotated, Any, Optional

import typer

from nemo2.base.columns import columns, folded
from nemo2.base.counts import counted
from nemo2.base.errors import CannotBuild, ConfigError
from nemo2.base.place import is_terminal
from nemo2.cli.adapter import Result
from nemo2.cli.commands import not_with
from nemo2.cli.flags import UNCHANGED, RecipeOptions, machine_of, recipe_on
from nemo2.cli.sources import RECIPE_HELP, Overrides
from nemo2.mcore.settle.machine import Machine


def check(
    name: Annotated[Optional[str], typer.Argument(help=RECIPE_HELP)] = None,
    overrides: Overrides = None,
    *,
    options: RecipeOptions = UNCHANGED,
    here: bool = False,
    rules: bool = False,
) -> Result:
    """Check a recipe against all rules, without running it.

    Lists every broken rule and the nearest legal layouts. Exit code 0: the recipe can run. 1: it doesn't fit the GPUs of
    --gpus, so a launch needs --force. 2: a rule is broken.

    Args:
        here: Also check this machine's files, packages and variables, because the run will start here.
        rules: List all rules instead of checking a recipe.

    Example: nemo2 check llama3_8b strategy.tensor_model_parallel_size=4 strategy.sequence_parallel=True --nodes 2
    """
    not_with("rules", "name", "overrides", "gpus", "nodes", "devices", "performance", "data", "here")
    not_with("here", "gpus")
    if rules:
        return _rules()
    if name is None:
        raise ConfigError("check needs a recipe, as in `nemo2 check llama3_8b`. `nemo2 list` lists all recipes.")
    recipe = recipe_on(name, overrides, options=options)

    machine = Machine.here() if here else machine_of(options.gpus)
    verdict = judgement(recipe, name=name, machine=machine, chosen=options.devices is not None)
    if not verdict["problems"]:
        from nemo2.preflight.planner.fit import fit_of

        fit, again = None, _same_recipe(name, overrides or [], options=options)
        try:
            fit = fit_of(recipe, machine)
        except CannotBuild as error:
            verdict["problems"] = [{"rule": error.rule, "topic": "The ranks", "message": str(error)}]
        if fit is None and not (machine.local or verdict["problems"]):
            verdict["unjudged"] = (
                "memory: this recipe can't be rehearsed, and there is no formula for it; "
                f"`nemo2 rehearse {again}` says why"
            )
        verdict["memory"] = None
        if fit is not None:
            gpus = verdict["nodes"] * (verdict["devices"] or 1)
            verdict["memory"] = asdict(fit) | {"answer": fit.answer, "gpus": gpus, "sentence": fit.sentence(again)}
    memory = verdict.get("memory")
    unfit = memory is not None and memory["answer"] == "does not fit" and not memory["assumed"]
    return Result(verdict, report(verdict, colours=is_terminal(sys.stdout)), 2 if verdict["problems"] else int(unfit))


def _same_recipe(name: str, overrides: list[str], *, options: RecipeOptions) -> str:
    """The words that give another command the recipe of this one."""
    from nemo2.config.overrides import in_shell

    requested = {f"--{option}": value for option, value in asdict(options).items() if value}
    words = [word for option, value in requested.items() for word in (option, *[str(value)] * (value is not True))]
    return in_shell([name, *overrides, *words])


def judgement(recipe: Any, *, name: str, machine: Machine, chosen: bool = True) -> dict[str, Any]:
    """The rules' verdict on a recipe on a machine, as plain data. ``chosen``: the user named these devices."""
    from nemo2.data.mock import is_mock
    from nemo2.preflight.checks.facts import read_facts
    from nemo2.preflight.checks.find import find
    from nemo2.preflight.checks.nearest import nearest_layouts
    from nemo2.preflight.checks.table import RULES, is_of_the_layout
    from nemo2.preflight.planner.size import size_of

    facts = read_facts(recipe, machine=machine)
    # A launch on this machine starts the devices that the trainer names.
    launched = facts.devices if machine.local else None
    problems = find(recipe, devices=launched, local=machine.local, chosen=chosen, machine=machine)
    size = size_of(recipe, machine)
    near = nearest_layouts(facts) if any(map(is_of_the_layout, problems)) else []
    return {
        "recipe": name,
        "nodes": facts.nodes,
        "devices": facts.devices,
        "layout": facts.layout.describe(facts.world_size),
        "parameters": None if size is None else size.parameters,
        "model": "" if size is None else str(size),
        "mock_data": is_mock(facts.data),
        "machine": machine.describe(),
        "installed": {"python": machine.python, "megatron-core": machine.megatron_core},
        "rules": len(RULES),
        "problems": [{"rule": one.rule, "topic": one.topic, "message": one.message} for one in problems],
        "nearest_layouts": [
            {"layout": layout.describe(facts.world_size), "overrides": changes} for layout, changes in near
        ],
    }


def report(verdict: dict[str, Any], *, colours: bool = False) -> str:
    """The text of a verdict: one line for a legal recipe, else a table of the broken rules and the nearest legal
    layouts."""

    def style(text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if colours else text

    problems = verdict["problems"]
    machine = f"\nparameters: {verdict['model']}" if verdict.get("model") else ""
    machine += "\ndata: random tokens (MockDataModule)" if verdict.get("mock_data") else ""
    machine += f"\nchecked for {verdict['machine']}" if "machine" in verdict else ""
    world = f" on {counted(verdict['nodes'], 'node')} x {verdict['devices']}, {verdict['layout']}"
    head = f"{verdict['recipe']}{world if verdict['devices'] else ''}: "  # a rule reports a world of no size
    if not problems:
        memory = verdict.get("memory")
        colour = {"fits": "32", "tight": "33", "does not fit": "31"}
        said = verdict.get("unjudged", "") if memory is None else style(memory["sentence"], colour[memory["answer"]])
        if memory is not None and memory["answer"] == "does not fit" and not memory["assumed"]:
            said += "\na launch needs --force"
        said = said and f"\n{said}"
        return head + style(f"legal, {verdict['rules']} rules hold", "32") + said + machine
    from nemo2.preflight.checks.rules.types import TYPES

    lines = [head + style(counted(len(problems), "problem"), "31")]
    for problem in problems:
        lines += ["", f"{style(problem['rule'], '1')}  ({problem['topic']})"]
        for paragraph in problem["message"].splitlines():
            lines.append(folded(paragraph, first=2))
    if any(problem["topic"] == TYPES.title for problem in problems):
        lines += ["", "The other rules are checked once each value has its type."]
    if verdict["nearest_layouts"]:
        from nemo2.config.overrides import in_shell

        lines += ["", style("nearest legal layouts", "1")]
        near = [(one["layout"], in_shell(one["overrides"])) for one in verdict["nearest_layouts"]]
        lines += columns(near, indent=2)
    return "\n".join(lines) + machine


def _rules() -> Result:
    from nemo2.preflight.checks.table import TOPICS

    rows = [
        {"rule": rule.name, "topic": rule.topic, "says": rule.says, "otherwise": rule.otherwise}
        for topic in TOPICS
        for rule in topic.rules
    ]
    longest = max(len(rule.name) for topic in TOPICS for rule in topic.rules)
    lines: list[str] = []
    for topic in TOPICS:
        rules = [(rule.name, rule.says) for rule in topic.rules]
        lines += ["", topic.title, *columns(rules, least=longest, indent=2)]
    return Result(rows, "\n".join(lines[1:]))
