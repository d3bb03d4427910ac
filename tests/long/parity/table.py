# SPDX-License-Identifier: Apache-2.0
"""Reports as the table of docs/parity.md: kept as one JSON file per version of Megatron-Core, from which the page is made."""

import json
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.long.parity.layouts import ROWS, Row
from tests.long.parity.models import MODELS
from tests.long.parity.run import Report, fingerprint

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "parity.md"
RESULTS = ROOT / "bench" / "results" / "parity"


def keep(reports: list[Report]) -> Path:
    """Write what is known of this version into its file under bench/results/. Rows that were not run stay as they were, but
    for those that have become others since."""
    path = RESULTS / f"megatron-core-{version('megatron-core')}.json"
    known = {report["name"]: report for report in json.loads(path.read_text())["rows"]} if path.is_file() else {}
    known |= {report["name"]: {k: v for k, v in report.items() if k != "trace"} for report in reports}
    rows = [known[row.name] for row in ROWS if known.get(row.name, {}).get("fingerprint") == fingerprint(row)]
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("megatron-core", "torch", "lightning")},
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows)),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def records() -> list[dict[str, Any]]:
    """The kept files, oldest version first."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("megatron-core-*.json")]
    return sorted(found, key=lambda record: [int(part) for part in record["versions"]["megatron-core"].split(".")])


def written_anew(page: str, kept: list[dict[str, Any]]) -> str:
    """The text of the page with what stands between its markers made from the records."""
    parts = {
        "runs": runs(kept),
        "models": models_table(),
        "fp32": table(kept, bf16=False),
        "bf16": table(kept, bf16=True),
    }
    for name, text in parts.items():
        start = f"<!-- generated: {name} -->\n"
        pattern = re.compile(f"({re.escape(start)}).*?(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)
        assert count == 1, f"{PAGE.name} has no place for {name}"
    return page


def runs(kept: list[dict[str, Any]]) -> str:
    """One line per version: what was measured, with which packages, and the result."""
    head = [
        "Megatron-Core",
        "torch",
        "Lightning",
        "date",
        "rows",
        "hold",
        "rejected, as expected",
        "fail",
        "not measured",
        "minutes of CPU",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for record in kept:
        verdicts = [row["verdict"] for row in record["rows"]]
        counts = [len(ROWS), verdicts.count("holds"), verdicts.count("refused")]
        counts += [sum(verdict.startswith("fails") for verdict in verdicts), len(ROWS) - len(verdicts)]
        cells = [
            *(record["versions"][name] for name in ("megatron-core", "torch", "lightning")),
            record["date"],
            *counts,
            f"{record['cpu_seconds'] / 60:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def models_table() -> str:
    """A line for each model."""
    lines = ["| model | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {model.about} |" for name, model in MODELS.items())])


def table(kept: list[dict[str, Any]], *, bf16: bool) -> str:
    """A line per row and version."""
    last = "worst gradient of a parameter (allowed)" if bf16 else "worst gradient of a parameter"
    head = ["model", "layout", "ranks", "Megatron-Core", "loss", "gradient norm", last]
    head += ["loss from fp32 (one process's)"] if bf16 else []
    head += ["verdict"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in ROWS:
        if (row.run.precision != "32") != bf16:
            continue
        for record in kept:
            report = next((one for one in record["rows"] if one["name"] == row.name), None)
            version_of = record["versions"]["megatron-core"]
            report = report or {"megatron_core": version_of, "verdict": "not measured"}
            lines.append(_line(row, report, bounds=bf16))
    return "\n".join(lines)


def _line(row: Row, report: Report, *, bounds: bool) -> str:
    cells = [row.run.model, row.layout, str(row.ranks), report["megatron_core"]]
    if "loss" in report:
        allowed = {name: f" ({report['bounds'][name]:.1e})" if bounds else "" for name in report["bounds"]}
        cells += [f"{report[name]:.1e}{allowed[name]}" for name in ("loss", "grad_norm")]
        cells.append(f"{report['gradient']:.1e}{allowed['gradient']} `{report['parameter']}`")
        if bounds:
            cells.append("{of_layout:.1e} ({of_one_process:.1e})".format(**report["from_fp32"]))
    else:
        cells += [""] * (4 if bounds else 3)
    return f"| {' | '.join([*cells, report['verdict']])} |"
