# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show``: what a recipe is, why, and how it differs from another; its layout; what is in a checkpoint."""

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.columns import columns
from nemo2.base.counts import byte_size, counted
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.files import refuse_existing, write_file
from nemo2.base.names import visible
from nemo2.base.place import is_terminal
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.commands import OptionGroup, not_with, refuse_across, refuse_all_but
from nemo2.cli.flags import UNCHANGED, Output, RecipeOptions, machine_line, machine_of, recipe_on
from nemo2.cli.new_recipe import as_source, check_importable, docstring
from nemo2.cli.run_names import checkpoint_called, last_started
from nemo2.cli.sources import RECIPE_HELP, Overrides, configured
from nemo2.mcore.settle.machine import Machine

GROUPS = (
    OptionGroup("Checkpoint", "checkpoint", own=("verify",)),
    OptionGroup("Reasons", "explain", own=("executor", "plugins"), beside=("as_json",)),
    OptionGroup(
        "Layout", "layout", own=("rank", "world_size", "microbatches", "backward"), beside=("output", "as_json")
    ),
    OptionGroup("Difference", "diff", own=("exit_code",), beside=("python", "as_json", "defaults")),
    *(
        OptionGroup("Format", option, beside=("defaults",))
        for option in ("output", "python", "as_yaml", "as_json", "flat", "who", "defaults")
    ),
)
"""What can be asked of a recipe, and in which form it is answered."""


def show(
    name: Annotated[str, typer.Argument(help=f"{RECIPE_HELP} Or a checkpoint's directory.")],
    overrides: Overrides = None,
    *,
    flat: bool = False,
    as_yaml: Annotated[bool, typer.Option("--yaml")] = False,
    python: bool = False,
    output: Output = None,
    defaults: bool = False,
    who: bool = False,
    explain: Annotated[Optional[str], typer.Option(metavar="FIELD")] = None,
    executor: Optional[str] = None,
    plugins: Optional[list[str]] = None,
    diff: Annotated[Optional[str], typer.Option(metavar="RECIPE")] = None,
    exit_code: bool = False,
    layout: bool = False,
    rank: Annotated[Optional[int], typer.Option(min=0)] = None,
    world_size: Annotated[Optional[int], AT_LEAST_1] = None,
    microbatches: Annotated[Optional[int], AT_LEAST_1] = None,
    backward: Annotated[float, typer.Option(min=0)] = 2.0,
    checkpoint: bool = False,
    verify: bool = False,
    options: RecipeOptions = UNCHANGED,
) -> Result:
    """Print a recipe's settings, their reasons, or its layout.

    Also compares recipes, writes them in other formats, and identifies a checkpoint.

    Exit code 2: a checkpoint isn't complete.

    Args:
        flat: Print one path=value per line, for grep and diff.
        as_yaml: Print YAML. Every command accepts the edited file as a recipe.
        python: Print a Python function that rebuilds every setting; with --diff, one that makes the changes.
        output: Write a recipe (.py, .yaml, .json) or a picture (.svg, .html).
        defaults: Also print fields that have their default.
        who: Also print the file and line that set each value.
        explain: Explain a field's value in the run. 'all': every changed field. 'environment': the ranks' variables.
        executor: With --explain environment: a cluster.
        plugins: With --explain environment: plugins.
        diff: Print only what differs from this recipe.
        exit_code: With --diff: exit code 1 if they differ in effect.
        layout: Show the ranks' layers, groups and pipeline.
        rank: With --layout: print only this rank.
        world_size: With --layout: any number of ranks.
        microbatches: With --layout: micro-batches per step.
        backward: With --layout: forward passes per backward.
        checkpoint: Identify a run's newest checkpoint instead of its recipe.
        verify: Read every file of the checkpoint and verify its SHA-256.

    Example: nemo2 show llama3_8b strategy.tensor_model_parallel_size=4
    """
    if checkpoint or is_checkpoint(name):
        refuse_all_but("name", "checkpoint", "verify", "as_json", why="of a checkpoint")
        return identified(name, verify=verify)
    refuse_across(GROUPS)
    if output is not None:
        _refuse_output(output, layout=layout)
    recipe = recipe_on(name, overrides, options=options)
    label = " ".join([name, *(overrides or [])])
    if explain is not None:
        return reasons(recipe, options.gpus, explain, executor, plugins or [])
    if layout:
        not_with("world_size", "gpus", "nodes", "devices")
        pipeline = {"num_microbatches": microbatches, "backward": backward}
        return layout_of(recipe, name, options.gpus, world_size=world_size, rank=rank, output=output, pipeline=pipeline)
    if diff is not None:
        return difference(diff, recipe, label, everything=defaults, code=python, exit_code=exit_code)
    print(machine_line(recipe, machine_of(options.gpus)), file=sys.stderr)  # standard output may be read by a program
    origin = label + (f" on {options.gpus}" if options.gpus else "")
    origin += " in performance mode" if options.performance else ""
    if output is not None:
        if output.suffix in (".py", ".json"):
            not_with("output", "defaults")
        return _written(recipe, origin, output, defaults=defaults)
    if python:
        not_with("python", "defaults")
        return Result(None, _text_of(recipe, origin, ".py").removesuffix("\n"))
    if as_yaml:
        return Result(None, _text_of(recipe, origin, ".yaml", defaults=defaults).removesuffix("\n"))
    from nemo2.config.overrides import as_override, in_shell
    from nemo2.config.show import flatten, plain, render

    if flat:
        lines = [in_shell([as_override(path, value)]) for path, value in flatten(recipe, defaults=defaults).items()]
        return Result(None, visible("\n".join(lines)))
    return Result(plain(recipe, defaults), render(recipe, defaults=defaults, who=who))


show.groups = GROUPS  # pyright: ignore[reportFunctionMemberAccess]
_RECIPES = (".py", ".yaml", ".yml", ".json")
_LAYOUTS = (".html", ".svg")


def _refuse_output(output: Path, *, layout: bool) -> None:
    if layout and output.suffix not in _LAYOUTS:
        raise ConfigError(f"--output {output}: a layout is written to a {' or '.join(_LAYOUTS)} file.")
    if layout:
        return
    from nemo2.report.pictures.recipe_tree import SUFFIXES

    if output.suffix not in (*_RECIPES, *SUFFIXES):
        raise ConfigError(f"--output {output}: must end in one of {', '.join((*_RECIPES, *SUFFIXES))}.")
    if output.suffix in _RECIPES:
        check_importable(output)
        refuse_existing(output)


def _written(recipe: Any, origin: str, output: Path, *, defaults: bool) -> Result:
    """Write the recipe as a text that every command accepts, or as a picture."""
    if output.suffix not in _RECIPES:
        from nemo2.report.pictures.recipe_tree import write_picture

        return Result(None, str(write_picture(recipe, output, title=origin, defaults=defaults)))
    write_file(output, _text_of(recipe, origin, output.suffix, defaults=defaults), new=True)
    return Result(None, f"{output}: run it with `nemo2 pretrain {as_source(output)}`")


def _text_of(recipe: Any, origin: str, suffix: str, *, defaults: bool = False) -> str:
    if suffix == ".json":
        from nemo2.config.serialize import to_json

        return to_json(recipe, indent=2) + "\n"
    if suffix != ".py":
        from nemo2.config import to_yaml

        return to_yaml(recipe, defaults=defaults)
    from nemo2 import __version__
    from nemo2.config.codegen import function_source

    return function_source(
        recipe,
        header=docstring(f"{origin}, as nemo2 {__version__} builds it. Written by `nemo2 show --python`."),
        doc="The whole run; what is not here has its class's default.",
    )


def layout_of(
    recipe: Any,
    name: str,
    gpus: Optional[str],
    *,
    world_size: Optional[int],
    rank: Optional[int],
    output: Optional[Path],
    pipeline: dict[str, Any],
) -> Result:
    """Which layers each rank holds, the process groups, and the pipeline's timeline; or one rank's place.

    Args:
        output: The page (.html) or figure (.svg) to write.
        pipeline: Further arguments of `nemo2.report.pictures.layout_page.view`.
    """
    from nemo2.mcore.settle import on
    from nemo2.report.pictures.layout_page import draw, layout_json, layout_page, layout_text, view
    from nemo2.report.pictures.ranks import place_recipe

    recipe = on(recipe, machine_of(gpus))
    placement = place_recipe(recipe, name=name, world_size=world_size)
    if rank is not None:
        not_with("rank", "microbatches", "backward", "output", "as_json")
        return Result(None, _one_rank(placement, rank))
    shown = view(recipe, placement, **pipeline)
    if output is not None:
        from nemo2.report.pictures.svg import standalone

        text = layout_page(shown) if output.suffix == ".html" else standalone(draw(shown).render())
        write_file(output, text)
        return Result(layout_json(shown), str(output))
    width = shutil.get_terminal_size((120, 24)).columns
    return Result(layout_json(shown), layout_text(shown, width=width, colour=sys.stdout.isatty()))


def _one_rank(placement: Any, rank: int) -> str:
    from nemo2.report.pictures.placement import describe_rank
    from nemo2.report.pictures.terminal import ranks_text

    if rank >= placement.world_size:
        raise ConfigError(f"--rank {rank}: must be 0 to {placement.world_size - 1}, the ranks of this layout.")
    lines = [describe_rank(placement, rank)]
    for kind, words in placement.kinds.items():
        group = placement.group_of(kind, rank)
        if len(group) > 1:
            lines.append(f"{words} group: {ranks_text(group)}")
    return "\n".join(lines)


def is_checkpoint(source: str) -> bool:
    """Whether ``source`` is the directory of a checkpoint, and neither a run's nor a recipe's name."""
    from nemo2 import recipes

    path = Path(source).expanduser()
    if not path.is_dir() or last_started(path) is not None or source in recipes.names():
        return False
    from nemo2.hugging_face.identify import kind_at

    try:
        kind_at(path)
    except CheckpointError:
        return False
    return True


def identified(path: str, *, verify: bool) -> Result:
    """What the checkpoint of nemo2, NeMo 2.0, Megatron-LM or Hugging Face at ``path`` is. Exit code 2: it isn't
    complete."""
    from nemo2.hugging_face.identify import identify

    checkpoint = identify(checkpoint_called(path), verify=verify)
    data = dataclasses.asdict(checkpoint) | {"path": str(checkpoint.path)}
    return Result(data, "\n".join(lines(checkpoint)), 2 if checkpoint.problems else 0)


def lines(checkpoint: Any) -> list[str]:
    """The printed lines about an `Identified` checkpoint."""
    facts = {
        "format": checkpoint.kind,
        "path": checkpoint.path,
        "step": checkpoint.step,
        "samples": None if checkpoint.consumed_samples is None else f"{checkpoint.consumed_samples:,}",
        "layout": checkpoint.layout,
        "holds": {True: "weights only", False: "weights and optimizer state", None: None}[checkpoint.weights_only],
        "parameters": None
        if checkpoint.parameters is None
        else f"{checkpoint.parameters:,} ({', '.join(checkpoint.dtypes)})",
        "size": f"{byte_size(checkpoint.size_bytes)} in {checkpoint.files} files",
        "written by": ", ".join(f"{name} {version}" for name, version in checkpoint.versions.items()) or None,
        "whole": "yes" if not checkpoint.problems else f"NO: {'; '.join(checkpoint.problems[:5])}",
    }
    rows = [(name, value) for name, value in facts.items() if value is not None]
    rows += [("note", note) for note in checkpoint.notes]
    return [
        *columns(rows),
        *(["next:"] if checkpoint.commands else []),
        *(f"  {visible(command)}" for command in checkpoint.commands),
    ]


ENVIRONMENT, ALL = "environment", "all"
"""Words in place of a field: the environment variables of the ranks; every setting that differs from its default."""


def reasons(recipe: Any, gpus: Optional[str], field: str, executor: Optional[str], plugins: list[str]) -> Result:
    """Every value that ``field`` had on its way into the run. `ALL`: the final value of each setting that differs from its
    default. `ENVIRONMENT`, which alone depends on ``executor`` and ``plugins``: the ranks' variables."""
    if field == ENVIRONMENT:
        return _variables(recipe, gpus, executor, plugins)
    not_with("explain", "executor", "plugins")
    from nemo2.mcore.settle.settling import settle
    from nemo2.preflight.explain.fields import explain, explain_all

    effective = settle(recipe, Machine.here() if gpus is None else machine_of(gpus))
    settings = explain_all(recipe, effective) if field == ALL else explain(recipe, effective, field)
    size = effective.world.size if effective.world else effective.layout.model_parallel_size
    text = "\n".join(setting.line() for setting in settings) if field == ALL else "\n\n".join(map(str, settings))
    how = "" if field == ALL else "; the last line of each setting is the value in the run"
    text += f"\n\nOn {counted(size, 'rank')} of {effective.machine.describe()}, {effective.layout.describe()}{how}."
    refused = "".join(f"\n\nThe run would stop with an error: {refusal}" for refusal in effective.messages)
    return Result(_as_data(settings, effective, size), text + refused)


def _as_data(settings: list[Any], effective: Any, size: int) -> dict[str, Any]:
    from nemo2.config.show import plain

    def layers(one: Any) -> list[dict[str, Any]]:
        return [{"value": plain(layer.value), "who": layer.who, "requested": layer.requested} for layer in one.layers]

    return {
        "settings": [{"path": one.path, "value": plain(one.effective), "layers": layers(one)} for one in settings],
        "machine": effective.machine.describe(),
        "ranks": size,
        "layout": effective.layout.describe(),
        "refused": list(effective.messages),
    }


def _variables(recipe: Any, gpus: Optional[str], executor: Optional[str], plugins: list[str]) -> Result:
    """The environment variables that nemo2 sets for the ranks, and why."""
    from nemo2.launch.environment import origin_lines, variable_origins
    from nemo2.launch.launcher import apply_shape, place_of
    from nemo2.launch.plugins.apply import build_plugins, split_plugins

    base, _, machine = place_of(executor, None)
    machine = machine_of(gpus) if gpus else machine
    devices, nodes, _ = apply_shape(recipe, machine, devices=None, nodes=None, name=None)
    origins = variable_origins(
        recipe,
        None if base in (None, "local") else base.clone(),
        machine,
        plugins=build_plugins(split_plugins(plugins)),
        devices=devices,
        nodes=nodes,
        profile=executor or "",
    )
    where = f"{counted(nodes, 'node')} x {machine.counted(devices)}"
    text = "\n".join([*origin_lines(origins), f"\nOn {where}; the first line of each is the value that the ranks get."])
    by_name = {variable: [value._asdict() for value in values] for variable, values in origins.items()}
    data = {"variables": by_name, "machine": where}
    return Result(data, text if origins else f"nemo2 sets no variables for {where}.")


_COLOURS = {"~": "\033[33m", "+": "\033[32m", "-": "\033[31m"}
_RESET = "\033[0m"


def difference(old: str, after: Any, label: str, *, everything: bool, code: bool, exit_code: bool) -> Result:
    """What differs between the recipe ``old`` and the tree ``after``.

    Args:
        label: The name of ``after``.
        everything: Also tell of fields that one recipe sets to the other's default.
        code: Tell it as a Python function that turns one into the other.
        exit_code: Exit with code 1 if they differ in effect.
    """
    from nemo2.config.edits import describe, edits, edits_source

    before = configured(old, [])
    steps = edits(before, after)
    in_effect = [step for step in steps if not step.changes_nothing]
    code_now = int(exit_code and bool(in_effect))
    if code:
        source = edits_source(before, after, doc=docstring(f"{old} as {label}."))
        return Result(None, source.removesuffix("\n"), code_now)
    shown = steps if everything else in_effect
    hidden = len(steps) - len(shown)
    coloured = is_terminal(sys.stdout)
    lines = [f"--- {old}", f"+++ {label}"] if shown else ["no difference in effect" if hidden else "no difference"]
    for mark, line in describe(shown):
        lines.append(f"{_COLOURS[mark]}{mark} {line}{_RESET}" if coloured else f"{mark} {line}")
    if hidden:
        lines.append(f"({hidden} more fields are set to the other's default; show them with --defaults)")
    return Result(_rows(shown), "\n".join(lines), code_now)


def _rows(steps: list[Any]) -> list[dict[str, Any]]:
    from nemo2.config.edits import Unset
    from nemo2.config.show import plain

    def shown(value: Any) -> Any:
        return None if isinstance(value, Unset) else plain(value)

    return [
        {
            "path": step.path,
            "kind": step.kind,
            "old": shown(step.old),
            "new": shown(step.new),
            "in_effect": not step.changes_nothing,
        }
        for step in steps
    ]
