# SPDX-License-Identifier: Apache-2.0
"""``nemo2 trace``: reports how much of a run's communication overlapped computation."""

from pathlib import Path
from typing import Annotated, Optional

import typer

from nemo2.cli.flags import AsJson, print_json
from nemo2.cli.run_names import run_folder

TRACE_EXAMPLE = "Example: nemo2 trace nemo_experiments/llama_tiny/2026-01-31_12-00-00"


def register(app: typer.Typer) -> None:
    app.command("trace", epilog=TRACE_EXAMPLE)(trace)


def trace(
    run: Annotated[
        str, typer.Argument(help="A run with traces/ (directory or name), or a directory of rank-N.json files.")
    ],
    output: Annotated[
        Optional[Path],
        typer.Option("--output", "-o", help="HTML page to write. Default: overlap.html beside the traces."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report how much communication of a profiled run overlaps computation.

    Also writes an HTML page with a timeline per rank. With --json, writes the page only if you give --output.
    """
    from nemo2.trace.report import PAGE, TRACES, render, rows, text, traces_of

    run_dir = run_folder(run)
    traces = traces_of(run_dir)
    if output is None and not as_json:
        output = (run_dir / TRACES if (run_dir / TRACES).is_dir() else run_dir) / PAGE
    if output is not None:
        output.write_text(render(traces, title=f"Overlap: {run_dir.absolute().name}"), encoding="utf-8")
    if as_json:
        print_json(rows(traces))
    else:
        print(f"{text(traces)}\n{output}")
