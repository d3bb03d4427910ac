# SPDX-License-Identifier: Apache-2.0
"""Calibrates the planner on published measurements, and tells how far its predictions are off.

    python -m bench.planner              # what the calibrated constants give, per project
    python -m bench.planner --memory     # verdicts and peaks of the memory formula
    python -m bench.planner --calibrate  # fit, leave out, write calibrated.json beside the planner, and the pages: ten minutes

`make calibrate` is the last, and writes docs/plan-calibration.md and the table of docs/plan.md. No constant belongs
to a model or to a source; what a source's software does is in `rows.SOFTWARE`.
"""

import argparse
from pathlib import Path

from bench.planner import memory_score, report
from bench.planner.fit import errors_of, fit, left_out
from bench.planner.memory_rows import memory_rows
from bench.planner.rows import rows
from nemo2.preflight.planner.constants import calibrated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan-calibration.md"
USERS_PAGE = ROOT / "docs" / "plan.md"
RESULTS = ROOT / "bench" / "results" / "planner-per-source.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory_score.table(list(memory_rows())))
    elif arguments.calibrate:
        calibrate()
    else:
        measured = list(rows())
        errors = errors_of(measured, calibrated()).tolist()
        print(report.project_table(measured, errors, errors))


def calibrate() -> None:
    """Fit on all rows; predict each source, and each project, by constants that were fitted without it; write what was found."""
    measured = list(rows())
    fitted = fit(measured)
    print(report.constants_table(fitted), flush=True)
    by_project = left_out(measured, fitted, lambda row: row.family)
    by_source = left_out(measured, fitted, lambda row: row.source)
    memory = list(memory_rows())
    tables = {
        "speed": report.project_table(measured, by_source.tolist(), by_project.tolist()),
        "ranking": report.ranking_lines(measured, by_source.tolist(), by_project.tolist()),
        "band": report.coverage_line(measured, by_project),
        "memory": memory_score.table(memory),
        "constants": report.constants_table(fitted),
    }
    report.write_calibration(fitted, measured, by_project)
    for name, text in tables.items():
        print(f"\n{text}", flush=True)
        report.replace_between(PAGE, name, text)
    trust = report.trust_table(measured, by_project.tolist(), memory_score.score(memory))
    report.replace_between(USERS_PAGE, "trust", trust)
    report.replace_between(RESULTS, "sources", report.source_table(measured, by_source.tolist()))


if __name__ == "__main__":
    main()
