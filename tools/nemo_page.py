# SPDX-License-Identifier: Apache-2.0
"""The table of every public name of NeMo 2.0 in docs/from_nemo.md: ``python -m tools.nemo_page`` writes it."""

from pathlib import Path

from nemo2.from_nemo.names import find

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "from_nemo.md"
NAMES = ROOT / "tools" / "nemo_names.txt"
BEGIN, END = "<!-- every name, written by `python -m tools.nemo_page` -->", "<!-- end of every name -->"


_HEAD = "This table counts the public names of NeMo 2.0. The next table lists every name that nemo2 renames or lacks."


def sections() -> dict[str, list[str]]:
    """NeMo 2.0's public names by module."""
    found: dict[str, list[str]] = {}
    for line in NAMES.read_text().splitlines():
        if line.startswith("## "):
            names = found[line.removeprefix("## ")] = []
        elif not line.startswith("#"):
            names += line.split()
    return found


def table() -> str:
    """The counts, and a row for each name that isn't the same."""
    by_reason: dict[str, list[str]] = {}
    counts = {"works": 0, "renamed": 0, "gone": 0}
    lines = [_HEAD, "", "| package of NeMo 2.0 | names | same | renamed | missing |", "|---|---:|---:|---:|---:|"]
    for section, names in sections().items():
        found = {name: find(name) for name in names}
        here = {status: sum(one.status == status for one in found.values()) for status in counts}
        counts = {status: counts[status] + here[status] for status in counts}
        lines.append(f"| {section} | {len(names)} | {here['works']} | {here['renamed']} | {here['gone']} |")
        for name, one in found.items():
            if one.status != "works":
                told = f"`{one.home}.{one.name}`" if one.status == "renamed" else one.reason
                by_reason.setdefault(told, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {told} |" for told, names in by_reason.items()]
    lines.append(f"| total | {sum(counts.values())} | {' | '.join(str(counts[status]) for status in counts)} |")
    return "\n".join([*lines, "", "| renamed or missing | replacement or reason |", "|---|---|", *rows])


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
