# SPDX-License-Identifier: Apache-2.0
"""``nemo2 runs trace``: reports how much of a run's communication overlapped computation."""

from nemo2.cli.adapter import Result
from nemo2.cli.commands import as_json
from nemo2.cli.flags import Output
from nemo2.cli.run_names import run_folder
from nemo2.files import write_file


def trace(
    run: str,
    *,
    output: Output = None,
) -> Result:
    """Report how much communication of a profiled run overlaps computation.

    Also writes an HTML page with a timeline per rank. With --json, writes the page only if you give --output.

    Args:
        run: A run with traces/ (directory or name), or a directory of rank-N.json files.
        output: HTML page to write. Default: overlap.html beside the traces.

    Example: nemo2 runs trace nemo_experiments/llama_tiny/2026-01-31_12-00-00
    """
    from nemo2.trace.report import PAGE, TRACES, render, rows, text, traces_of

    run_dir = run_folder(run)
    traces = traces_of(run_dir)
    if output is None and not as_json():
        output = (run_dir / TRACES if (run_dir / TRACES).is_dir() else run_dir) / PAGE
    if output is not None:
        write_file(output, render(traces, title=f"Overlap: {run_dir.absolute().name}"))
    return Result(rows(traces), f"{text(traces)}\n{output}")
