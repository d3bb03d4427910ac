# SPDX-License-Identifier: Apache-2.0
"""``nemo2 runs``: the runs below the working directory and in $NEMO2_RUNS: listed, compared, followed."""

import json
import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import App
from nemo2.cli.flags import AsJson
from nemo2.cli.run_names import RECIPE_FILE, Run, all_runs, run_folder

runs = App(no_args_is_help=True, help="Runs on this machine: list, compare, tail.")
_PAUSE = 0.5


def register(app: typer.Typer) -> None:
    app.add_typer(runs, name="runs", epilog="Example: nemo2 runs compare first second --html compared.html")


@runs.command("list", epilog="Example: nemo2 runs list 'llama*'")
def list_runs(
    pattern: Annotated[Optional[str], typer.Argument(help="Names to list, with * and ?, or a part of a name.")] = None,
    most: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """The runs that a name reaches, with their steps, losses and speed, the one that logged last first."""
    from nemo2.cli.list_show import matches
    from nemo2.columns import columns
    from nemo2.run_dir.compare import COLUMNS, rows_of, summary
    from nemo2.run_dir.run_folder import RunFolder

    found = [
        run for run in dict.fromkeys(all_runs()) if pattern is None or matches(pattern, run.absolute().parent.name)
    ]
    told = sorted((summary(RunFolder(run)) for run in found), key=lambda one: -(one["written"] or 0.0))[:most]
    if as_json:
        print(json.dumps(told, indent=2))
        return
    if not told:
        print("No runs below the working directory" + ("." if pattern is None else f" with a name like {pattern!r}."))
        return
    rows = [[one["name"], *row, one["folder"]] for one, row in zip(told, rows_of(told), strict=True)]
    print("\n".join(columns(rows, head=["name", *COLUMNS, "folder"], right=range(1, 6), folds=7)))


@runs.command("compare", epilog="Example: nemo2 runs compare first second --html compared.html")
def compare(
    names: Annotated[list[str], typer.Argument(help="Two to eight runs, by their folders or names.")],
    html: Annotated[Optional[Path], typer.Option(help="Write a page with their curves over each other.")] = None,
    as_json: AsJson = False,
) -> None:
    """Figures of runs side by side, their losses at the last step that all have, and the settings that differ."""
    from nemo2.columns import columns
    from nemo2.config.show import format_value
    from nemo2.errors import ConfigError
    from nemo2.run_dir.compare import (
        COLUMNS,
        comparison_page,
        differences,
        labels,
        losses_at_one_step,
        rows_of,
        summary,
    )
    from nemo2.run_dir.run_folder import RunFolder

    found = [RunFolder(run_folder(name)) for name in names]
    if not 2 <= len(found) <= 8:
        raise ConfigError(f"{len(found)} runs: two to eight can be compared.")
    called = labels(found)
    recipes, without = _recipes(found)
    changes = differences(recipes) if recipes else []
    if html is not None:
        html.write_text(comparison_page(found, changes, without=without), "utf-8")
    told = [summary(run) for run in found]
    common = losses_at_one_step(found)
    if as_json:
        settings = {path: dict(zip(called, map(format_value, values), strict=True)) for path, values in changes}
        at = None if common is None else {"step": common[0], "loss": dict(zip(called, common[1], strict=True))}
        print(
            json.dumps(
                {"runs": dict(zip(called, told, strict=True)), "at_one_step": at, "settings": settings}, indent=2
            )
        )
        return
    rows = [[name, *row] for name, row in zip(called, rows_of(told), strict=True)]
    print("\n".join(columns(rows, head=["run", *COLUMNS], right=range(1, 6))))
    if common is not None:
        step, losses = common
        print(f"\nloss at step {step + 1:,}: " + ", ".join(f"{n} {v:.5g}" for n, v in zip(called, losses, strict=True)))
    print()
    if changes:
        settings = [[path, *map(format_value, values)] for path, values in changes]
        print("\n".join(columns(settings, head=["setting", *called], folds=1)))
    else:
        print(without or "The recipes are the same.")
    if html is not None:
        print(f"\n{html}")


@runs.command("tail", epilog="Example: nemo2 runs tail llama_tiny --follow")
def tail(
    run: Run,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last records.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the last step, or Ctrl-C, which leaves the run alone.")
    ] = False,
) -> None:
    """The last records of a run's metrics.jsonl, as its progress lines."""
    from nemo2.run_dir.progress_line import format_record
    from nemo2.run_dir.run_folder import RunFolder

    folder = RunFolder(run_folder(run))
    shown = 0
    planned = folder.planned_steps
    while True:
        records = folder.records
        for record in records[max(shown, len(records) - lines if not shown else 0) :]:
            print(format_record(record, planned), flush=True)
        shown = len(records)
        planned = planned or folder.planned_steps
        if not follow or (planned is not None and folder.steps >= planned):
            return
        time.sleep(_PAUSE)


def _recipes(found: list[Any]) -> tuple[list[Any], str]:
    """The recipes of runs; none of them, and why, where one can't be read."""
    from nemo2.cli.sources import recipe_tree
    from nemo2.errors import Nemo2Error

    try:
        return [recipe_tree(str(run / RECIPE_FILE)) for run in found], ""
    except Nemo2Error as error:
        return [], f"Their settings can't be compared: {error}"
