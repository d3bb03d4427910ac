# SPDX-License-Identifier: Apache-2.0
"""`nemo2 rehearse`: its exit codes, its JSON, its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.printed import printed

LINES = (
    "rehearse llama_tiny --gpus H100x2 --json --html PAGE",
    "rehearse llama_tiny model.config.hidden_size=16384 --gpus RTX4090x2 --no-advice",
    "rehearse llama_tiny --gpus H1000",
    "rehearse llama_tiny strategy.context_parallel_size=3 --gpus H100x2",
    "rehearse llama_tiny model.config.hidden_size=8192 --gpus RTX4090x2 --headroom 0.9 --no-advice",
)


@pytest.fixture(scope="module")
def ran(run_on_ranks: Any, tmp_path_factory: Any) -> tuple[list[tuple[int, str]], Path]:
    page = tmp_path_factory.mktemp("page") / "rehearsal.html"
    lines = [line.replace("PAGE", str(page)) for line in LINES]
    return run_on_ranks(printed, 1, *lines, init_process_group=False)[0], page


def test_a_job_that_fits_ends_with_0_and_its_json_is_all_that_is_printed(ran: Any) -> None:
    code, text = ran[0][0]
    result = json.loads(text[text.index("{") :])
    assert code == 0 and result["verdict"]["fits"] and result["num_gpus"] == 2


def test_a_job_that_does_not_fit_ends_with_1(ran: Any) -> None:
    code, text = ran[0][1]
    assert code == 1 and "DOES NOT FIT: " in text
    code, text = ran[0][4]
    assert code == 1 and "TIGHT: " in text, "it fits, but not with so much left free"


def test_bad_input_ends_with_2_and_says_what_is_wrong(ran: Any) -> None:
    (first, gpu), (second, layout) = ran[0][2:4]
    assert first == 2 and "must be one of" in gpu
    assert second == 2 and "context_parallel_size" in layout


def test_the_page_is_complete_in_itself(ran: Any) -> None:
    page = ran[1].read_text()
    assert "Rehearsal of llama_tiny" in page and "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
