# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show --layout``: text, page, picture and JSON of a recipe's layout."""

import re
from xml.etree import ElementTree

import pytest

from nemo2.mcore.parallel.pipeline_schedule import Schedule, timeline
from nemo2.report.pictures.svg import text_width
from nemo2.report.pictures.terminal import ranks_text, timeline_text

SVG = "{http://www.w3.org/2000/svg}"


def test_a_thousand_ranks_are_one_readable_page_with_one_bubble_and_a_meaning_for_each_colour(tmp_path, command):
    page = tmp_path / "layout.html"
    line = "show llama3_70b --layout data.global_batch_size=1152 --world-size 1152 --output"
    assert command(line, page).out.strip() == str(page)
    text = page.read_text()
    assert "2 of 36 replicas, 64 of 1,152 ranks" in text and "32 micro-batches" in text
    assert "<script" not in text and len(text) < 300_000
    (header,) = re.findall(r"<b>([\d.]+%)</b><span>of a step in the pipeline", text)
    rows = re.findall(r">([\d.]+%)</td></tr>", text)
    assert rows == re.findall(r"([\d.]+%) idle, holds", text) == [header] * 4 == ["1.8%"] * 4
    layers, ranks, step = (
        {*re.findall(r'<rect class="(c\d)', one)} for one in re.findall(r"<svg.*?</svg>", text, re.S)
    )
    assert layers == ranks and len(layers) == 4 and not layers & step


def test_text_says_who_holds_what_and_how_long_the_pipeline_waits(command):
    changes = ["strategy.pipeline_model_parallel_size=4", "trainer.devices=8", "--microbatches", "8"]
    text = command("show llama3_8b --layout strategy.context_parallel_size=1", *changes).out
    assert "llama3_8b: 8 ranks on 1 node of 8: PP 4 · DP 2" in text
    assert "layers 24-31, output" in text and "1F1B: 4 stages, 8 micro-batches, bubble 27.3% of the time" in text


def test_a_rank_says_what_it_is(command):
    text = command("show mixtral_8x7b --layout --rank 13").out
    assert (
        "rank 13 on node 1" in text and "experts 5 of each MoE layer" in text and "expert parallel group: 8-15" in text
    )


def test_json_has_every_group_and_every_pass(command):
    facts = command("show mixtral_8x7b_16k --layout --json").json
    assert sorted(rank for group in facts["groups"]["tp"] for rank in group) == list(range(facts["world_size"]))
    assert len(facts["pipeline"]["passes"]) == facts["layout"]["pp"]
    passes = facts["pipeline"]["passes"][0]
    assert len(passes) == 2 * facts["pipeline"]["num_microbatches"]
    busy = sum(one["end"] - one["start"] for row in facts["pipeline"]["passes"] for one in row)
    span = max(one["end"] for row in facts["pipeline"]["passes"] for one in row)
    assert facts["pipeline"]["bubble_fraction"] == pytest.approx(1 - busy / span / facts["layout"]["pp"])


def test_a_picture_holds_ranks_experts_and_timeline(tmp_path, command):
    path = tmp_path / "new" / "layout.svg"
    command("show qwen3_30b_a3b --layout --microbatches 1024 -o", path)
    picture = ElementTree.fromstring(path.read_text())
    words = [one.text for one in picture.iter(f"{SVG}text")]
    (caption,) = (str(text) for text in words if "of 1,024 micro-batches" in str(text))
    assert 8 + text_width(caption) < float(picture.attrib["width"]), "it is cut off"
    assert any("128 experts over 4 ranks" in str(text) for text in words)
    assert any("1F1B: 2 stages" in str(text) for text in words)


def test_a_batch_that_does_not_divide_still_shows_the_ranks(command):
    text = command("show llama3_70b --layout --world-size 1152").out
    assert "0, 288, 576, 864" in text and "No timeline: data.global_batch_size=512" in text and "504 or 540" in text


def test_the_terminal_timeline_is_drawn_to_scale():
    first, second, legend = timeline_text(timeline(Schedule(pp=2, num_microbatches=2)), width=80).splitlines()
    assert first == "stage 0 0>1>....<0==..<1=="
    assert second == "stage 1 ..0><0==1><1==...."
    assert legend.startswith("0> forward")


def test_a_timeline_too_wide_for_the_terminal_leaves_the_numbers_out():
    lines = timeline_text(timeline(Schedule(pp=4, num_microbatches=64)), width=100).splitlines()[:-1]
    assert len(lines) == 4 and all(len(line) <= 104 and set(line[8:]) <= set("><.") for line in lines)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 4), "0, 4"),
        (tuple(range(0, 64, 8)), "0, 8, 16 ... 56"),
        ((0, 1, 2, 3, 8, 9, 10, 11), "0-3 8-11"),
    ],
)
def test_ranks_are_written_in_short(ranks, text):
    assert ranks_text(ranks) == text
