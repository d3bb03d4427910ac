# SPDX-License-Identifier: Apache-2.0
"""The table of docs/hugging_face.md: a row for each tiny model that the tests hold against transformers' own.

python -m tools.hugging_face        # write it; `make fmt` does
"""

from pathlib import Path

from support.hf_models import ROWS, Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hugging_face.md"
BEGIN, END = "<!-- families, written by `make fmt` from support/hf_models.py -->", "<!-- end of the families -->"
TRANSFORMERS_HAS_NONE = "names of the release"


def table() -> str:
    """`ROWS` as Markdown, with what `tests/nemo2/models/conversion/test_parity.py` asserts of each."""
    lines = ["| family | transformers' class | what is on | layouts | read by transformers |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(_line(row) for row in ROWS)])


def page() -> str:
    """The page with the table as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _line(row: Row) -> str:
    kind = row.config.removesuffix("Config").removesuffix("Text")
    layouts = " · ".join(("1", *row.layouts))
    return f"| {row.name} | {kind} | {row.switches} | {layouts} | {'yes' if row.readable else TRANSFORMERS_HAS_NONE} |"


if __name__ == "__main__":
    PAGE.write_text(page())
