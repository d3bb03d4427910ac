# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show``: what a recipe is, why, and how it differs from another; its layout; what is in a checkpoint."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing, write_file
from nemo2.base.names import visible
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.commands import OptionGroup, not_with, refuse_across, refuse_all_but
from nemo2.cli.diff import difference
from nemo2.cli.explain import reasons
from nemo2.cli.flags import UNCHANGED, Output, RecipeOptions, machine_line, machine_of, recipe_on
from nemo2.cli.inspect import identified, is_checkpoint
from nemo2.cli.layout import layout_of
from nemo2.cli.new_recipe import as_source, check_importable, docstring
from nemo2.cli.sources import RECIPE_HELP, Overrides

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
