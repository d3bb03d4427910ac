# SPDX-License-Identifier: Apache-2.0
"""The report: complete in itself, true to the metrics, safe with any text in them."""

import errno
import json
import math
import re
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import yaml

from nemo2.base.errors import DataError, RuntimeFault
from nemo2.checkpoint.directory import Manifest
from nemo2.report.pictures.charts import TOP, WIDTH, Mark, Series, line_chart, running_median, thin_out
from nemo2.report.pictures.svg import nice_ticks, standalone, text_width
from nemo2.training.run_dir.report import write_report


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "tiny" / "2026-01-01_00-00-00"
    directory.mkdir(parents=True)
    lines = [
        {
            "step": s,
            "reduced_train_loss": 8 * 0.99**s,
            "lr": 1e-3,
            "train_step_timing": 0.5,
            "consumed_samples": 8 * s + 8,
        }
        for s in range(100)
    ]
    lines.append({"step": 99, "val_loss": 3.125})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "trainer": {"max_steps": 100},
        "data": {"seq_length": 128},
        "model": {"class": "<script>alert(1)</script>"},
    }
    (directory / "effective_config.yaml").write_text(yaml.safe_dump(settings))
    (directory / "environment.json").write_text(json.dumps({"host": "h", "versions": {"torch": "2.13", "te": None}}))
    finished = directory / "checkpoints" / "a-step=50"
    finished.mkdir(parents=True)
    manifest = Manifest(step=50, consumed_samples=400, layout={}, files={"weights/x": 3 * 2**20}, saved_at=1.7e9)
    (finished / "manifest.json").write_text(json.dumps(asdict(manifest)))
    (directory / "checkpoints" / "b-step=99").mkdir()  # no manifest: not a finished checkpoint
    return directory


def test_the_page_states_the_numbers_of_the_metrics(run_dir):
    page = write_report(run_dir).read_text()
    assert "<b>100</b><span>steps of 100</span>" in page
    assert f"<b>{8 * 0.99**99:.4g}</b><span>training loss, from 8</span>" in page
    assert "<b>3.125</b><span>best validation loss, step 100</span>" in page
    assert "<b>0.5 s</b>" in page
    assert "<b>800</b><span>samples, 102k tokens</span>" in page


def test_a_page_elsewhere_leaves_the_run_as_it_is(run_dir, tmp_path):
    before = sorted(run_dir.rglob("*"))
    page = write_report(run_dir, tmp_path / "pages" / "mine.html")
    assert page == tmp_path / "pages" / "mine.html" and sorted(run_dir.rglob("*")) == before
    assert page.read_text() == write_report(run_dir).read_text()


def test_a_folder_that_takes_no_page_is_told_with_what_to_do(run_dir, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("nemo2.training.run_dir.report.write_text", read_only)
    with pytest.raises(RuntimeFault, match=r"can't be written \(Read-only file system\).*output"):
        write_report(run_dir)


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script(run_dir):
    page = write_report(run_dir).read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", page)


def test_what_a_resume_found_changed_is_listed_the_worst_first(run_dir):
    assert "Recipe changes since" not in write_report(run_dir).read_text()
    changes = {"harmless": ["trainer.max_steps: 2 -> 3"], "result": ["data.seed: 1 -> <9>"], "unfit": []}
    (run_dir / "changes.json").write_text(json.dumps(changes))
    text = write_report(run_dir).read_text()
    assert "changes the result: data.seed: 1 -&gt; &lt;9&gt;" in text
    assert text.index("changes the result: data.seed") < text.index("harmless: trainer.max_steps")


def test_unfinished_checkpoints_are_not_listed(run_dir):
    page = write_report(run_dir).read_text()
    assert "a-step=50" in page and "3.0 MiB" in page and "b-step=99" not in page


def test_a_half_written_settings_file_does_not_prevent_the_report(run_dir):
    (run_dir / "effective_config.yaml").write_text("a: [1,")
    (run_dir / "environment.json").write_text("{")
    assert "Curves" in write_report(run_dir).read_text()


def test_the_curve_is_a_well_formed_svg_with_the_last_values(run_dir):
    write_report(run_dir)
    svg = (run_dir / "loss_curve.svg").read_text()
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "val 3.125" in texts
    assert any(text and text.startswith("train ") for text in texts)


def test_the_curve_marks_where_the_run_was_stopped_and_resumed_and_counts_steps_from_one(run_dir):
    lines = [{"step": 60, "stopped_at": 75}, {"step": 90, "stopped_at": 90}]
    (run_dir / "resumed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run_dir).read_text()
    root = ElementTree.fromstring((run_dir / "loss_curve.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    marks = [one for one in root.iter(f"{space}line") if "stroke-dasharray" in one.attrib]
    (again,) = [one for one in root.iter(f"{space}rect") if one.attrib["class"] == "shade"]
    assert len(marks) == 3 and "stopped at step 75, resumed at 60" in page and "stopped and resumed at step 90" in page
    at = {
        float(one.text): float(one.attrib["x"]) for one in root.iter(f"{space}text") if one.text in ("20", "40", "60")
    }
    assert float(marks[0].attrib["x1"]) == pytest.approx(at[60], abs=0.2)
    assert float(again.attrib["width"]) == pytest.approx((at[60] - at[40]) * 15 / 20, abs=0.2)
    assert root.find(f".//{space}path[@class='s0 raw']") is not None, "the points beneath their median"
    assert "step 100: train" in page and "step 0:" not in page


def test_words_of_marks_stand_above_the_plot_and_over_no_others():
    marks = [Mark(x=x, words=f"stopped and resumed at step {x}") for x in (10, 11, 40, 100)]
    chart = ElementTree.fromstring(
        line_chart("t", [Series(name="a", points=[(x, float(x)) for x in range(1, 101)])], y_label="loss", marks=marks)
    )
    space = "{http://www.w3.org/2000/svg}"
    shown = {one[0].tail or "": one for one in chart.iter(f"{space}text") if len(one)}
    assert list(shown) == [f"stopped and resumed at step {x}" for x in (10, 40, 100)]
    ends = [(float(one.attrib["x"]), float(one.attrib["x"]) + text_width(words)) for words, one in shown.items()]
    assert ends[0][0] > text_width("loss") and all(
        one[1] < other[0] for one, other in zip(ends, ends[1:], strict=False)
    )
    assert ends[-1][1] < WIDTH and all(float(one.attrib["y"]) < TOP for one in shown.values())


def test_on_a_phone_each_curve_is_one_drawn_as_wide_as_its_figure(run_dir):
    """A figure of a page 390 px wide has 328 px inside; a picture whose least width is more would scroll."""
    text = write_report(run_dir).read_text()
    narrow = re.findall(r"<div class='if-narrow'><svg[^>]*min-width:(\d+)px", text)
    assert len(narrow) == text.count("<figure") > 1 and max(map(int, narrow)) <= 328
    assert "@media(max-width:560px){.if-narrow{display:block}.unless-narrow{display:none}}" in text


def test_a_report_of_no_run_is_a_plain_error(tmp_path):
    with pytest.raises(DataError, match="run directory"):
        write_report(tmp_path / "missing")


def test_points_lie_where_the_axes_say():
    chart = ElementTree.fromstring(
        line_chart("t", [Series(name="a", points=[(0, 0.0), (10, 5.0), (20, 10.0)], markers=True)], y_label="y")
    )
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in chart.iter("{http://www.w3.org/2000/svg}circle")]
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11) and y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    labels = {e.text: e.attrib for e in chart.iter("{http://www.w3.org/2000/svg}text")}
    assert float(labels["10"]["x"]) in (pytest.approx(x1, abs=0.1), pytest.approx(50.0, abs=1))
    assert float(labels["0"]["y"]) > float(labels["8"]["y"])


def test_gaps_stay_gaps_and_an_empty_chart_says_so():
    chart = line_chart("t", [Series(name="a", points=[(0, 1.0), (1, math.nan), (2, 3.0)])], y_label="y")
    (path,) = re.findall(r'<path class="s0" d="([^"]*)"', chart)
    assert path.count("M") == 2 and path.count("L") == 0
    assert "no values of y" in line_chart("t", [Series(name="a", points=[(0, math.nan)])], y_label="y")
    ElementTree.fromstring(standalone(chart))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.3, 8.7), (-5.0, 1e6), (3e-7, 4e-7), (5.0, 5.0), (0.0, 0.0)])
def test_ticks_are_round_and_span_the_values(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 3 <= len(ticks) <= 14
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5, 10)) < 1e-3


@pytest.mark.parametrize("values", [(5e-324, 1e-310), (1e-14, 9e-14), (-1.7e308, 1.7e308), (1.0, 1.0 + 1e-15)])
def test_a_curve_of_extreme_numbers_is_drawn(values):
    chart = line_chart("t", [Series(name="a", points=list(enumerate(values)))], y_label="y")  # pyright: ignore
    ElementTree.fromstring(standalone(chart))
    assert "nan" not in chart and "inf" not in chart


def test_thinning_keeps_every_spike():
    points = [(float(s), 1000.0 if s == 4321 else (s % 7)) for s in range(10_000)]
    thinned = thin_out(points, limit=200)
    assert len(thinned) <= 202 and (4321.0, 1000.0) in thinned
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_the_running_median_has_no_lag_and_ignores_one_outlier():
    points = [(s, float(s)) for s in range(200)]
    points[100] = (100, 1e9)
    assert all(abs(y - x) <= 1 for x, y in running_median(points))
