# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hugging_face.md: a row for each tiny model that the tests hold against transformers' own.

python -m tools.hugging_face                        # write it; `make fmt` does
python -m tools.hugging_face --measure [ROW ...]    # measure its figures again, first; of all rows in some minutes
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from support.hf_models import ROWS, Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hugging_face.md"
BEGIN, END = "<!-- families, written by `make fmt` from support/hf_models.py -->", "<!-- end of the families -->"
TRANSFORMERS_HAS_NONE = "no: names of the release"
FIGURES = Path(__file__).resolve().parents[1] / "bench" / "results" / "hugging-face-logits.json"
_TIMEOUT_SECONDS = 1200
_AT_ONCE = 8


def table() -> str:
    """`ROWS` as Markdown, with what `tests/nemo2/models/conversion/test_parity.py` asserts and measured of each."""
    head = "| family | transformers' class | features | layouts | in, 1e-6 | out, 1e-6 | read by transformers |"
    measured = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(_line(row, measured.get(row.name, {})) for row in ROWS)])


def figures(alone: Mapping[str, Any], ranks: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """What is measured of a row in one process and, by ``ranks``, at its layouts: the greatest differences of logits, the tensors
    that come back with other bytes, and the greedy tokens that are transformers'."""
    layouts = {name: max(rank[name] or 0.0 for rank in ranks) for name in ranks[0]}
    tokens, expected = (sum(each, []) for each in alone["greedy"])
    return {
        "family": alone["family"],
        "in": max([alone["import"], *layouts.values()]),
        "out": alone.get("export"),
        "layouts": layouts,
        "other_bytes": len(alone["back"]) + len(alone["again"]),
        "greedy": len(tokens) if tokens == expected else 0,
    }


def measure(names: Sequence[str]) -> None:
    """Measure these rows, some in each process, and add them to the figures at once.

    Raises:
        ConfigError: the table has no such row.
    """
    from support import hf_parity, ranks

    known = [row.name for row in ROWS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--measure {name!r}: {PAGE.name} has no such row{did_you_mean(name, known)}")
    ranks.prepare("transformers.models.auto.modeling_auto", "transformers.generation.utils")
    for some in (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE)):
        with TemporaryDirectory() as folder:
            (alone,) = ranks.run(hf_parity.both_ways, 1, folder, some, timeout=_TIMEOUT_SECONDS)
            laid_out = ranks.run(hf_parity.at_layouts, 2, folder, some, timeout=_TIMEOUT_SECONDS)
        measured = {name: figures(alone[name], [rank[name] for rank in laid_out]) for name in some}
        print("\n".join(f"{name}: {of_row}" for name, of_row in measured.items()), flush=True)
        stored = json.loads(FIGURES.read_text()) | measured
        in_order = {row.name: stored[row.name] for row in ROWS if row.name in stored}
        FIGURES.write_text(json.dumps(in_order, indent=1) + "\n")


def page() -> str:
    """The page with the table as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _line(row: Row, measured: Mapping[str, Any]) -> str:
    kind = row.config.removesuffix("Config").removesuffix("Text")
    layouts = " · ".join(("1", *row.layouts))
    differences = " | ".join("–" if (one := measured.get(way)) is None else f"{one * 1e6:.1f}" for way in ("in", "out"))
    read = "yes" if row.readable else TRANSFORMERS_HAS_NONE
    return f"| {row.name} | {kind} | {row.switches} | {layouts} | {differences} | {read} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        try:
            measure(sys.argv[2:] or [row.name for row in ROWS])
        except ConfigError as error:
            sys.exit(f"error: {error}")
    PAGE.write_text(page())
