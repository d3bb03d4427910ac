# SPDX-License-Identifier: Apache-2.0
"""The kit of pictures: well-formed, escaped, true to the numbers, nothing from elsewhere."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nemo2.report import pictures
from nemo2.report.pictures.bars_and_points import Bar, Limit, Point, scatter_chart, stacked_bars
from nemo2.report.pictures.charts import Series, line_chart
from nemo2.report.pictures.page import cards, figure, figures, page, paragraph, section, table
from nemo2.report.pictures.svg import STYLE, Canvas, stack, standalone, text_width

SVG = "{http://www.w3.org/2000/svg}"
PAGE_STYLE = Path(pictures.__file__).with_name("page.css")
HOSTILE = "<script>alert('&')</script>\""


def drawn(canvas: Canvas) -> ElementTree.Element:
    return ElementTree.fromstring(canvas.render())


def rects(root: ElementTree.Element, fill: str) -> list[dict[str, float]]:
    found = [one for one in root.iter(f"{SVG}rect") if fill in one.attrib["class"].split()]
    return [{name: float(one.attrib[name]) for name in ("x", "y", "width", "height")} for one in found]


def test_words_are_escaped_everywhere():
    canvas = Canvas(100, 50, title=HOSTILE, description=HOSTILE)
    canvas.rect(0, 0, 10, 10, tip=HOSTILE)
    canvas.text(0, 10, HOSTILE, tip=HOSTILE)
    canvas.circle(1, 1, 1, tip=HOSTILE)
    root = ElementTree.fromstring(standalone(canvas.render()))
    assert root.attrib["aria-label"] == HOSTILE and root.attrib["role"] == "img"
    assert [one.text for one in root.iter(f"{SVG}title")] == [HOSTILE] * 4
    text = page(HOSTILE, section(HOSTILE, paragraph(HOSTILE), cards([(HOSTILE, HOSTILE)])), subtitle=HOSTILE)
    text += figure(canvas.render(), HOSTILE) + table([HOSTILE], [[HOSTILE]])
    assert "<script" not in text


def test_every_fill_a_picture_may_name_is_in_the_stylesheet_for_both_themes():
    light, dark = STYLE.split("@media(prefers-color-scheme:dark)")
    for name in ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "ink", "soft", "card", "grid", "bad"):
        assert f"--{name}:" in light and f"--{name}:" in dark and f".picture .{name}{{" in STYLE


def test_bars_are_as_long_as_their_values_and_stand_end_to_end():
    chart = drawn(
        stacked_bars("m", [Bar(name="s0", parts={"a": 10, "b": 30}), Bar(name="s1", parts={"b": 15})], unit="GB")
    )
    # The first rectangle of each fill is the legend's swatch.
    (_, first), (_, second, other) = rects(chart, "c0"), rects(chart, "c1")
    assert second["width"] == pytest.approx(3 * first["width"], abs=0.2)
    assert other["width"] == pytest.approx(1.5 * first["width"], abs=0.2)
    assert second["x"] == pytest.approx(first["x"] + first["width"], abs=0.2) and other["x"] == first["x"]


def test_a_bar_over_the_limit_is_marked_and_one_below_is_not():
    bars = [Bar(name="fits", parts={"a": 70.0}), Bar(name="does not", parts={"a": 90.0})]
    chart = drawn(stacked_bars("m", bars, unit="GB", limit=Limit(name="80 GB", value=80)))
    marked = [one.text for one in chart.iter(f"{SVG}text") if "bad" in one.attrib["class"].split()]
    assert marked == ["90", "80 GB"] or marked == ["80 GB", "90"]


def test_a_bar_is_judged_by_what_must_stay_free_and_the_line_stands_where_that_begins():
    """75.6 of 79.1 looks like a fit where 4 are kept free, and is none."""
    bars = [Bar(name="fits", parts={"a": 75.1}), Bar(name="does not", parts={"a": 75.2})]
    limit = Limit(name="75.1 GiB usable", value=79.1, kept_free=4.0)
    chart = drawn(stacked_bars("m", bars, unit="GiB", limit=limit))
    texts = [one for one in chart.iter(f"{SVG}text") if "bad" in one.attrib["class"].split()]
    assert [one.text for one in texts] == ["75.2", "75.1 GiB usable"]
    (dashed,) = [one.attrib for one in chart.iter(f"{SVG}line") if "stroke-dasharray" in one.attrib]
    _, first, second = rects(chart, "c0")
    assert first["x"] + first["width"] == pytest.approx(float(dashed["x1"]), abs=0.2)
    (band,) = rects(chart, "tint")
    assert band["x"] == pytest.approx(float(dashed["x1"]), abs=0.2)
    assert band["width"] == pytest.approx(first["width"] * 4 / 75.1, abs=0.2)


def test_totals_stand_in_a_column_that_no_line_crosses():
    bars = [Bar(name="bar", parts={"a": size}) for size in (3.0, 61.5, 79.0, 99.5)]
    chart = drawn(stacked_bars("m", bars, unit="GiB", limit=Limit(name="80", value=80)))
    totals = [one for one in chart.iter(f"{SVG}text") if one.text in ("3", "61.5", "79", "99.5")]
    assert len({one.attrib["x"] for one in totals}) == 1 and {one.attrib["text-anchor"] for one in totals} == {"end"}
    left = float(totals[0].attrib["x"]) - text_width("99.5")
    assert all(float(one.attrib["x1"]) < left for one in chart.iter(f"{SVG}line"))
    assert all(box["x"] + box["width"] < left for box in rects(chart, "c0"))


def test_labels_lie_beside_the_plot_and_apart_with_a_line_to_their_dots():
    near = [Point(x=1 + place / 40, y=5 - place / 90, label=str(place)) for place in range(6)]
    others = [Point(x=1 + (place % 7) / 30, y=5 - (place % 5) / 8) for place in range(30)]
    chart = drawn(scatter_chart("p", [*near, *others, Point(x=9, y=9)], x_label="GB", y_label="s"))
    dots = [(one.attrib["cx"], one.attrib["cy"]) for one in chart.iter(f"{SVG}circle")]
    labels = [one for one in chart.iter(f"{SVG}text") if "strong" in one.attrib["class"].split()]
    assert {one.text for one in labels} == set("012345")
    assert all(float(one.attrib["x"]) > max(float(x) for x, _ in dots) + 5 for one in labels)
    heights = sorted(float(one.attrib["y"]) for one in labels)
    assert all(other - one >= 14.9 for one, other in zip(heights, heights[1:], strict=False))
    joined = [
        (one.attrib["x1"], one.attrib["y1"]) for one in chart.iter(f"{SVG}line") if "stroke-dasharray" in one.attrib
    ]
    assert sorted(joined) == sorted(dots[: len(near)])


def test_points_are_placed_by_value_and_the_frontier_joins_only_what_nothing_beats():
    points = [Point(x=1, y=9), Point(x=2, y=5), Point(x=3, y=7), Point(x=4, y=1)]
    chart = drawn(scatter_chart("p", points, x_label="GB", y_label="s"))
    centres = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in chart.iter(f"{SVG}circle")]
    assert centres[1][0] - centres[0][0] == pytest.approx(centres[2][0] - centres[1][0], abs=0.2)
    assert centres[0][1] < centres[2][1] < centres[1][1] < centres[3][1]
    lines = [one.attrib for one in chart.iter(f"{SVG}line") if one.attrib["class"] == "accent"]
    ends = [tuple(round(float(line[name]), 1) for name in ("x1", "y1", "x2", "y2")) for line in lines]
    assert ends == [(*centres[0], *centres[1]), (*centres[1], *centres[3])]


def test_charts_without_values_still_say_what_they_are():
    assert "no values of s" in scatter_chart("p", [], x_label="GB", y_label="s").render()
    drawn(stacked_bars("m", [], unit="GB"))


def test_stacked_pictures_lie_below_each_other():
    one, other = Canvas(100, 40, title="one"), Canvas(200, 60, title="other")
    both = stack([one, other], title="both", gap=10)
    assert (both.width, both.height) == (200, 110) and "translate(0 50)" in both.render()


def test_a_page_stands_alone():
    text = page("t", figure(stacked_bars("m", [Bar(name="s", parts={"a": 1})], unit="GB").render(), "c"))
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", text)


def test_numbers_of_a_table_stand_right_with_separated_thousands():
    text = table(["name", "bytes"], [["a", 1234567], ["b", 2.5]])
    assert "<td class='number'>1,234,567</td>" in text and "<td>a</td>" in text


def test_columns_of_numbers_stand_right_also_with_their_units_and_have_the_same_places():
    rows = [["first", "1,234", "12.5%", "-", 1234.5678, "0-7"], ["second", "7", "3.0%", "3 of 40", 0.5, "0, 8"]]
    text = table(["name", "a", "b", "c", "d", "ranks"], rows)
    assert "<th>name</th>" in text and "<th>ranks</th>" in text
    assert all(f"<th class='number'>{name}</th>" in text for name in "abcd")
    assert "<td class='number'>1,234.6</td>" in text and "<td class='number'>0.5</td>" in text
    small = table(["a"], [[0.00125], [0.5]])
    assert "0.001<" in small.replace("0.0013", "0.001") and "0.5" in small
    assert table(["a"], []) == "<table class='plain'><tr><th>a</th></tr></table>"


def style_at(width: int) -> dict[str, dict[str, str]]:
    """Properties of a page by selector on a screen of this width, later rules over earlier ones."""
    blocks = re.compile(r"@media\(([^{]*)\)\{((?:[^{}]*\{[^{}]*\})*)\}")
    text = re.sub(r"/\*.*?\*/", "", PAGE_STYLE.read_text(), flags=re.DOTALL)
    rules = blocks.sub("", text)
    for condition, inside in blocks.findall(text):
        name, _, limit = condition.partition(":")
        if name == "max-width" and width <= int(limit.removesuffix("px")):
            rules += inside
    found: dict[str, dict[str, str]] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", rules):
        for selector in selectors.split(","):
            found.setdefault(selector.strip(), {}).update(
                part.split(":", 1)
                for part in filter(None, body.split(";"))  # pyright: ignore
            )
    return found


def test_on_a_narrow_screen_tables_and_pictures_scroll():
    """A table of its own width overflows as a block only; cells as narrow as a letter, or a cut table, couldn't be read."""
    phone, desk = style_at(400), style_at(1200)
    assert (phone["table"].get("display"), phone["table"].get("overflow-x")) == ("block", "auto")
    assert "display" not in desk["table"] and desk["table"]["width"] == "100%"
    assert phone["figure .scroll"]["overflow-x"] == desk["figure .scroll"]["overflow-x"] == "auto"
    canvas = Canvas(820, 100, title="t")
    chart = line_chart("t", [Series(name="a", points=[(0, 1.0)])], y_label="y", width=520)
    # At its least width text of 11 px, a chart's of 12, is 11 px high.
    assert 'style="min-width:820px"' in canvas.render() and 'style="min-width:477px"' in chart
    assert f"<div class='scroll'>{chart}</div>" in figures([("c", chart, False)])
    assert "<div class='scroll'><svg" in figure(canvas.render(), "c")
    others = [name for name in phone if name != "table" and re.search(r"(^|[ >])table$|^\.plain$", name)]
    assert others == [], "which could take it back"


def test_the_width_of_words_grows_with_them():
    assert text_width("mmmm") > text_width("iiii") and text_width("mm", size=24) == 2 * text_width("mm")
