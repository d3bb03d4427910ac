# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hugging_face.md: a row for each tiny model that the tests hold against transformers' own.

python -m tools.hugging_face              # write it; `make fmt` does
python -m tools.hugging_face --measure    # measure its figures again, first (some minutes)
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.hf_models import ROWS, Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hugging_face.md"
BEGIN, END = "<!-- families, written by `make fmt` from support/hf_models.py -->", "<!-- end of the families -->"
TRANSFORMERS_HAS_NONE = "no: names of the release"
FIGURES = Path(__file__).resolve().parents[1] / "bench" / "results" / "hugging-face-logits.json"
MEASURED_VARIABLE = "NEMO2_LOGITS_FILE"
_TESTS = "tests/nemo2/models/conversion/test_parity.py"


def table() -> str:
    """`ROWS` as Markdown, with what `tests/nemo2/models/conversion/test_parity.py` asserts and measured of each."""
    head = "| family | transformers' class | features | layouts | in, 1e-6 | out, 1e-6 | read by transformers |"
    measured = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(_line(row, measured.get(row.name, {})) for row in ROWS)])


def figures(alone: Mapping[str, float], ranks: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The greatest difference of logits of a row: of one process and of ``ranks`` at all layouts, and of what was exported."""
    laid_out = [one for rank in ranks for one in rank.values() if one is not None]
    return {"in": max(alone["import"], *laid_out), "out": alone.get("export")}


def measure() -> None:
    """Run the tests of the table, which write `FIGURES`."""
    environment = {**os.environ, MEASURED_VARIABLE: str(FIGURES)}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", _TESTS, "-m", "", "-k", "not page"], env=environment, check=True
    )


def page() -> str:
    """The page with the table as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _line(row: Row, measured: Mapping[str, float | None]) -> str:
    kind = row.config.removesuffix("Config").removesuffix("Text")
    layouts = " · ".join(("1", *row.layouts))
    differences = " | ".join("–" if (one := measured.get(way)) is None else f"{one * 1e6:.1f}" for way in ("in", "out"))
    read = "yes" if row.readable else TRANSFORMERS_HAS_NONE
    return f"| {row.name} | {kind} | {row.switches} | {layouts} | {differences} | {read} |"


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    PAGE.write_text(page())
