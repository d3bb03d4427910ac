# SPDX-License-Identifier: Apache-2.0
"""The figures of the documentation are what the program draws."""

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def figures() -> Any:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_current_and_a_changed_one_is_noticed(tmp_path, monkeypatch):
    program = figures()
    assert program.stale() == [], "run python tools/figures.py"
    for path in program.FOLDER.glob("*.svg"):
        (tmp_path / path.name).write_text(path.read_text().replace("stage 0", "stage O", 1))
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    assert program.stale() == [f"{name}.svg" for name in program.FIGURES]


def test_every_figure_is_shown_on_a_page_and_the_bubbles_in_the_text_are_the_figures():
    page = (ROOT / "docs" / "parallelism.md").read_text()
    shown = set(re.findall(r"\]\(figures/(\w+)\.svg\)", page))
    assert shown == {path.stem for path in (ROOT / "docs" / "figures").glob("*.svg")}
    for name in ("schedules", "uneven"):
        drawn = re.findall(r"([\d.]+)% bubble</text>", (ROOT / "docs" / "figures" / f"{name}.svg").read_text())
        assert drawn and all(f"{value} %" in page for value in drawn)
