# SPDX-License-Identifier: Apache-2.0
"""``nemo2 runs``: the runs below the working directory and in $NEMO2_RUNS, and those submitted to Slurm.

A name stands for a run on this machine where there is one, else for a submitted run. `status` and `cancel` ask Slurm first.
"""

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.columns import columns
from nemo2.base.errors import ConfigError, DataError, Nemo2Error
from nemo2.base.files import write_file
from nemo2.base.names import did_you_mean
from nemo2.cli import submitted as slurm
from nemo2.cli.adapter import AT_LEAST_1, Result, print_json
from nemo2.cli.commands import as_json, not_with, refuse_all_but
from nemo2.cli.flags import Html, Output
from nemo2.cli.recipe_list import matches
from nemo2.cli.run_names import all_runs, run_called, run_folder
from nemo2.cli.sources import recipe_tree
from nemo2.training.run_dir.records import RECIPE_FILE

Run = Annotated[str, typer.Argument(help="A run: its directory or its name; a submitted one also by its Slurm job id.")]
_PAUSE = 0.5


def list_runs(
    pattern: Optional[str] = None,
    *,
    most: Annotated[int, AT_LEAST_1] = 20,
    submitted: bool = False,
) -> Result:
    """List runs with their steps, loss and speed, starting with the run that logged last.

    Args:
        pattern: Only runs whose name contains this text, or matches it (with * and ?).
        most: Maximum number of runs, newest first.
        submitted: List the runs that you submitted to Slurm from this machine, with their states.

    Example: nemo2 runs list 'llama*'
    """
    from nemo2.training.run_dir.compare import COLUMNS, FIRST_TO_GO, rows_of, summary
    from nemo2.training.run_dir.run_folder import RunFolder

    if submitted:
        matching = [one for one in slurm.submissions() if pattern is None or matches(pattern, one.name)]
        return slurm.listed(matching[-most:])
    folders = [
        run for run in dict.fromkeys(all_runs()) if pattern is None or matches(pattern, run.absolute().parent.name)
    ]
    summaries = sorted((summary(RunFolder(run)) for run in folders), key=lambda one: -(one["written"] or 0.0))[:most]
    rows = [[one["name"], *row, one["folder"]] for one, row in zip(summaries, rows_of(summaries), strict=True)]
    head = ["name", *COLUMNS, "folder"]
    text = "\n".join(columns(rows, head=head, right=range(1, 6), folds=7, optional=FIRST_TO_GO))
    if not summaries:
        text = "No runs below the working directory" + ("." if pattern is None else f" whose name matches {pattern!r}.")
    if count := len(slurm.submissions()):
        text += f"\n{count} submitted to Slurm: nemo2 runs list --submitted"
    return Result(summaries, text)


def compare(
    names: list[str],
    *,
    html: Html = None,
) -> Result:
    """Compare runs: results, the loss at the last common step, and the settings that differ.

    Args:
        names: Two to eight runs (directories or names).
        html: Also write an HTML page with the loss curves of all runs in one plot.

    Example: nemo2 runs compare first second --html compared.html
    """
    folders = [run_folder(name) for name in names]
    if twice := next((name for name, one in zip(names, folders, strict=True) if folders.count(one) > 1), None):
        raise ConfigError(f"{twice}: the same run is named twice. Name the directory of another run or start.")
    if not 2 <= len(folders) <= 8:
        raise ConfigError(f"{len(folders)} runs: compare takes two to eight runs.")
    from nemo2.config.show import format_value
    from nemo2.training.run_dir import compare as of_runs
    from nemo2.training.run_dir.run_folder import RunFolder

    runs = [RunFolder(folder) for folder in folders]
    called = of_runs.labels(runs)
    recipes, without = _recipes(runs)
    changes = of_runs.differences(recipes) if recipes else []
    if html is not None:
        write_file(html, of_runs.comparison_page(runs, changes, without=without))
    summaries = [of_runs.summary(run) for run in runs]
    common = of_runs.losses_at_one_step(runs)
    rows = [[name, *row] for name, row in zip(called, of_runs.rows_of(summaries), strict=True)]
    head = ["run", *of_runs.COLUMNS]
    lines = columns(rows, head=head, right=range(1, 6), folds=0, optional=of_runs.FIRST_TO_GO)
    at = None
    if common is not None:
        at = {"step": common[0], "loss": dict(zip(called, common[1], strict=True))}
        losses = ", ".join(f"{name} {value:.5g}" for name, value in at["loss"].items())
        lines += ["", f"loss at step {common[0] + 1:,}: {losses}"]
    settings = {path: list(map(format_value, values)) for path, values in changes}
    table = columns([[path, *values] for path, values in settings.items()], head=["setting", *called], folds=1)
    lines += ["", *(table if changes else [without or "The recipes are identical."])]
    by_run = {path: dict(zip(called, values, strict=True)) for path, values in settings.items()}
    data = {"runs": dict(zip(called, summaries, strict=True)), "at_one_step": at, "settings": by_run}
    return Result(data, "\n".join([*lines, *([] if html is None else ["", str(html)])]))


def tail(
    run: Run,
    *,
    lines: Annotated[Optional[int], AT_LEAST_1] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
) -> Result:
    """Print the last records of a run's metrics.jsonl as progress lines. --json prints them as JSON lines.

    Args:
        lines: Number of records to print.
        follow: Keep printing until the last step. Ctrl-C stops printing, not the run.

    Example: nemo2 runs tail llama_tiny --follow
    """
    if (submission := _submitted(run)) is not None:
        not_with("follow", "lines")
        refuse_all_but("run", "lines", "follow", why="for the log of a submitted run")
        return slurm.log(submission, lines=lines or 40, follow=follow)
    from nemo2.training.run_dir.progress_line import format_record
    from nemo2.training.run_dir.run_folder import RunFolder

    folder = RunFolder(_local(run))
    shown = 0
    planned = folder.planned_steps
    while True:
        records = folder.records
        for record in records[max(shown, len(records) - (lines or 10) if not shown else 0) :]:
            if as_json():
                print_json(record, on_a_line=True)
            else:
                print(format_record(record, planned), flush=True)
        shown = len(records)
        planned = planned or folder.planned_steps
        every = folder.effective.get("trainer", {}).get("log_every_n_steps") or 1
        # the run has ended: no further record will come
        if not follow or (planned is not None and planned - folder.steps < every):
            return Result(None)
        time.sleep(_PAUSE)


def status(run: Run) -> Result:
    """Print a run's progress, loss and speed; of a submitted run also its Slurm state, attempts and remaining time.

    Example: nemo2 runs status llama3_70b
    """
    from nemo2.training.run_dir.compare import summary
    from nemo2.training.run_dir.run_folder import RunFolder

    if (submission := slurm.find(run)) is not None:
        return slurm.status(submission)
    data = summary(RunFolder(_local(run)))
    rows = [(name, _shown(name, value)) for name, value in data.items() if value is not None]
    return Result(data, "\n".join(columns(rows)))


def _shown(name: str, value: Any) -> str:
    if name == "written":
        return datetime.fromtimestamp(value).isoformat(sep=" ", timespec="seconds")
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def report(run: Run, *, output: Output = None) -> Result:
    """Write report.html with the loss curve of a run. The run may still be training.

    A submitted run writes its report at every save and at its end; this downloads it.

    Args:
        output: File to write. Default: report.html in the run's directory, or here for a submitted run.

    Example: nemo2 runs report nemo_experiments/llama_tiny/2026-01-31_12-00-00
    """
    from nemo2.training.run_dir.report import write_report

    if (submission := _submitted(run)) is not None:
        path = slurm.fetch_report(submission, output or Path("report.html"))
    else:
        path = write_report(_local(run), output)
    return Result({"path": str(path)}, str(path))


def trace(run: str, *, output: Output = None) -> Result:
    """Report how much communication of a profiled run overlaps computation.

    Also writes an HTML page with a timeline per rank. With --json, writes the page only if you give --output.

    Args:
        run: A run with traces/ (directory or name), or a directory of rank-N.json files.
        output: HTML page to write. Default: overlap.html beside the traces.

    Example: nemo2 runs trace nemo_experiments/llama_tiny/2026-01-31_12-00-00
    """
    from nemo2.report.trace.report import PAGE, TRACES, render, rows, text, traces_of

    run_dir = run_folder(run)
    traces = traces_of(run_dir)
    if output is None and not as_json():
        output = (run_dir / TRACES if (run_dir / TRACES).is_dir() else run_dir) / PAGE
    if output is not None:
        write_file(output, render(traces, title=f"Overlap: {run_dir.absolute().name}"))
    return Result(rows(traces), f"{text(traces)}\n{output}")


def cancel(run: Run) -> Result:
    """Cancel a submitted run. Its ranks save a checkpoint first, and the run doesn't restart.

    Example: nemo2 runs cancel llama3_70b
    """
    return slurm.cancel(slurm.require(run))


def _submitted(run: str) -> Optional[Any]:
    """The submission that ``run`` names. None: it is a run on this machine, or no submission has the name."""
    return None if Path(run).expanduser().exists() or run_called(run) is not None else slurm.find(run)


def _local(run: str) -> Path:
    """The directory of a run on this machine. Errors: see `run_folder`; among the names, those of submissions."""
    try:
        return run_folder(run)
    except DataError as error:
        submitted = [submission.name for submission in slurm.submissions()]
        if submitted and not Path(run).is_absolute():
            also = f" No run of this name was submitted from this machine either{did_you_mean(run, submitted)}"
            raise DataError(f"{error}{also}") from error
        raise


def _recipes(runs: list[Any]) -> tuple[list[Any], str]:
    """The recipes of runs. If a recipe can't be read: no recipes, and the reason."""
    try:
        return [recipe_tree(str(run / RECIPE_FILE)) for run in runs], ""
    except Nemo2Error as error:
        return [], f"Can't compare the settings: {error}"
