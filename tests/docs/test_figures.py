# SPDX-License-Identifier: Apache-2.0
"""The figures of the documentation are what the program draws."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nemo2.report.pictures.svg import SMALLEST_TEXT
from tools import figures
from tools.explained import kit

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = {
    picture: page.name
    for page in sorted(DOCS.glob("*.md"))
    for picture in re.findall(r"!\[[^\]]{20,}\]\(figures/(\w+)\.svg\)", page.read_text())
}
"""The page that shows a figure, with a text for readers who can't see it."""


def test_figures_are_current_and_a_changed_one_is_noticed(tmp_path, monkeypatch):
    assert figures.stale() == [], "run make figures"
    for path in figures.FOLDER.glob("*.svg"):
        (tmp_path / path.name).write_text(path.read_text().replace("<text", "<text ", 1))
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert figures.stale() == [f"{name}.svg" for name in figures.FIGURES]


def test_the_curve_of_the_demo_is_as_wide_as_a_figure():
    (path,) = (DOCS / "images").glob("*.svg")
    assert float(ElementTree.fromstring(path.read_text()).attrib["width"]) == kit.WIDTH


def test_every_figure_is_shown_on_a_page_and_described_there():
    assert set(SHOWN) == {path.stem for path in figures.FOLDER.glob("*.svg")} == set(figures.FIGURES)


def test_the_bubbles_in_the_text_are_the_figures():
    page = (DOCS / "parallelism.md").read_text()
    for name in ("schedules", "uneven"):
        drawn = re.findall(r"([\d.]+)% bubble</text>", (figures.FOLDER / f"{name}.svg").read_text())
        assert drawn and all(f"{value}%" in page for value in drawn)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_readable_on_a_phone_and_names_what_it_shows(name):
    root = ElementTree.fromstring((figures.FOLDER / f"{name}.svg").read_text())
    width = float(root.attrib["width"])
    space = "{http://www.w3.org/2000/svg}"
    assert width == kit.WIDTH and root.attrib["aria-label"]
    assert all(float(one.attrib.get("font-size", 12)) >= SMALLEST_TEXT for one in root.iter(f"{space}text"))
    described = root.find(f"{space}desc")
    assert described is not None and described.text is not None
    page = (DOCS / f"{SHOWN[name]}").read_text()
    (words,) = re.findall(rf"figures/{name}\.svg\)\n+((?:.+\n)+)", page)
    assert 2 <= len(re.findall(r"[.:](?:\s|$)", words)) <= 6, "two to four sentences below a figure"
    for one in described.text.removeprefix("In code: ").split(", "):
        assert f"`{one}`" in words, f"{SHOWN[name]} doesn't name {one} below the figure"
