# SPDX-License-Identifier: Apache-2.0
"""``nemo2 runs``: lists, compares and follows the runs below the working directory and in $NEMO2_RUNS."""

import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import App
from nemo2.cli.flags import AsJson, print_json
from nemo2.cli.run_names import RECIPE_FILE, Run, all_runs, run_folder

runs = App(no_args_is_help=True, help="List, compare and follow the runs on this machine.")
_PAUSE = 0.5


def register(app: typer.Typer) -> None:
    app.add_typer(runs, name="runs", epilog="Example: nemo2 runs compare first second --html compared.html")


@runs.command("list", epilog="Example: nemo2 runs list 'llama*'")
def list_runs(
    pattern: Annotated[
        Optional[str], typer.Argument(help="Only runs whose name contains this text, or matches it (with * and ?).")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of runs, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs with their steps, loss and speed, starting with the run that logged last."""
    from nemo2.cli.list_show import matches
    from nemo2.columns import columns
    from nemo2.run_dir.compare import COLUMNS, rows_of, summary
    from nemo2.run_dir.run_folder import RunFolder

    found = [
        run for run in dict.fromkeys(all_runs()) if pattern is None or matches(pattern, run.absolute().parent.name)
    ]
    told = sorted((summary(RunFolder(run)) for run in found), key=lambda one: -(one["written"] or 0.0))[:most]
    if as_json:
        print_json(told)
        return
    if not told:
        print("No runs below the working directory" + ("." if pattern is None else f" whose name matches {pattern!r}."))
        return
    rows = [[one["name"], *row, one["folder"]] for one, row in zip(told, rows_of(told), strict=True)]
    print("\n".join(columns(rows, head=["name", *COLUMNS, "folder"], right=range(1, 6), folds=7)))


@runs.command("compare", epilog="Example: nemo2 runs compare first second --html compared.html")
def compare(
    names: Annotated[list[str], typer.Argument(help="Two to eight runs (directories or names).")],
    html: Annotated[
        Optional[Path], typer.Option(help="Also write an HTML page with the loss curves of all runs in one plot.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: results, the loss at the last common step, and the settings that differ."""
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

    folders = [run_folder(name) for name in names]
    if twice := next((name for name, one in zip(names, folders, strict=True) if folders.count(one) > 1), None):
        raise ConfigError(f"{twice}: the same run is named twice. Name the directory of another run or start.")
    found = [RunFolder(folder) for folder in folders]
    if not 2 <= len(found) <= 8:
        raise ConfigError(f"{len(found)} runs: compare takes two to eight runs.")
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
        print_json({"runs": dict(zip(called, told, strict=True)), "at_one_step": at, "settings": settings})
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
        print(without or "The recipes are identical.")
    if html is not None:
        print(f"\n{html}")


@runs.command("tail", epilog="Example: nemo2 runs tail llama_tiny --follow")
def tail(
    run: Run,
    lines: Annotated[int, typer.Option(min=1, help="Number of records to print.")] = 10,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep printing until the last step. Ctrl-C stops printing, not the run."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the last records of a run's metrics.jsonl as progress lines. --json prints them as JSON lines."""
    from nemo2.run_dir.progress_line import format_record
    from nemo2.run_dir.run_folder import RunFolder

    folder = RunFolder(run_folder(run))
    shown = 0
    planned = folder.planned_steps
    while True:
        records = folder.records
        for record in records[max(shown, len(records) - lines if not shown else 0) :]:
            if as_json:
                print_json(record, on_a_line=True)
            else:
                print(format_record(record, planned), flush=True)
        shown = len(records)
        planned = planned or folder.planned_steps
        every = folder.effective.get("trainer", {}).get("log_every_n_steps") or 1
        # the run has ended: no further record will come
        if not follow or (planned is not None and planned - folder.steps < every):
            return
        time.sleep(_PAUSE)


def _recipes(found: list[Any]) -> tuple[list[Any], str]:
    """The recipes of runs. If a recipe can't be read: no recipes, and the reason."""
    from nemo2.cli.sources import recipe_tree
    from nemo2.errors import Nemo2Error

    try:
        return [recipe_tree(str(run / RECIPE_FILE)) for run in found], ""
    except Nemo2Error as error:
        return [], f"Can't compare the settings: {error}"
