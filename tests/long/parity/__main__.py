# SPDX-License-Identifier: Apache-2.0
"""The parity table: every layout trains to the loss, the gradient norm and the gradients of one process.

    python -m tests.long.parity                       every row, for the Megatron-Core of this environment
    python -m tests.long.parity --quick               the few that the tests run too
    python -m tests.long.parity --rows 'mixtral: EP'  those whose name has these words in it
    python -m tests.long.parity --write docs/parity.md

A row that is done is kept, and not run again by the next call. The exit code is 1 if a row fails.
"""

import argparse
import time
from importlib.metadata import version
from pathlib import Path

from tests.long.parity import run, table
from tests.long.parity.layouts import ROWS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", metavar="WORDS", help="only rows whose name contains one of these")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="only rows of so many processes")
    parser.add_argument("--quick", action="store_true", help="only the rows that the tests run too")
    parser.add_argument("--list", action="store_true", help="name the rows, run nothing")
    parser.add_argument("--again", action="store_true", help="run rows anew that are done")
    parser.add_argument(
        "--folder", type=Path, default=Path("parity_run"), help="where rows are kept (default parity_run)"
    )
    parser.add_argument(
        "--at-once", type=int, default=2, metavar="N", help="rows that run at the same time (default 2)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take (default 300)")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="keep the figures and make the page's tables from them"
    )
    arguments = parser.parse_args()

    rows = [row for row in ROWS if row.quick or not arguments.quick]
    rows = [row for row in rows if not arguments.ranks or row.ranks in arguments.ranks]
    rows = [row for row in rows if not arguments.rows or any(words in row.name for words in arguments.rows)]
    if not rows:
        parser.error("no row is left; --list names them")
    if arguments.list:
        print("\n".join(f"{row.ranks} ranks  {row.name}" for row in rows))
        return 0
    started = time.monotonic()
    run.prepare()
    folder = arguments.folder.resolve() / f"megatron-core-{version('megatron-core')}"
    how = {"again": arguments.again, "timeout": arguments.timeout, "at_once": arguments.at_once}
    reports = run.run_rows(rows, folder, **how)
    failures = [report for report in reports if report["verdict"].startswith("fails")]
    for report in failures:
        print(f"\n{report['name']}\n{report.get('trace') or run.line(report)}")
    took, cpu = time.monotonic() - started, sum(report["cpu_seconds"] for report in reports)
    print(
        f"\n{len(reports) - len(failures)} of {len(reports)} rows are as they must be. This call took {took:.0f} s; the rows' "
        f"ranks took {cpu:.0f} s of CPU, kept ones included."
    )
    if arguments.write:
        table.keep(reports)
        arguments.write.write_text(table.written_anew(arguments.write.read_text(), table.records()))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
