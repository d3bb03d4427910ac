# SPDX-License-Identifier: Apache-2.0
"""`nemo2 plan`: its exit codes, its JSON, and its figures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo2.cli.adapter import described
from nemo2.cli.plan import plan
from support.printed import printed

LINES = (
    "plan llama_tiny --gpus H100x2 --tokens 1e9 --cost-per-gpu-hour 2 --json",
    "plan llama3_8b --gpus RTX4090x8",
    "plan llama_tiny --gpus H100x8 --search --limit 2 --global-batch 64 --html PAGE",
    "plan llama_tiny --gpus H100x2 --tokens -1",
    "plan llama_tiny strategy.context_parallel_size=3 --gpus H100x2",
    described(plan)[2].removeprefix("nemo2 "),
)


@pytest.fixture(scope="module")
def ran(run_on_ranks: Any, tmp_path_factory: Any) -> tuple[list[tuple[int, str]], Path]:
    page = tmp_path_factory.mktemp("plan") / "layouts.html"
    lines = [line.replace("PAGE", str(page)) for line in LINES]
    return run_on_ranks(printed, 1, *lines, init_process_group=False)[0], page


def test_the_figures_of_a_plan_agree_with_each_other(ran: Any) -> None:
    code, text = ran[0][0]
    made = json.loads(text[text.index("{") :])
    assert code == 0 and made["fits"] and made["counted"]
    speed = made["tokens_per_second_per_gpu"] * 2
    assert math.isclose(made["hours"], 1e9 / speed / 3600)
    assert math.isclose(speed, 16 * 128 / made["step_seconds"])
    assert made["goodput"]["hours"] > made["hours"] and math.isclose(made["cost"], made["goodput"]["hours"] * 2 * 2)
    assert made["mfu"] < made["mfu_full_attention"] < 1


def test_a_job_that_does_not_fit_ends_with_1(ran: Any) -> None:
    code, text = ran[0][1]
    assert code == 1 and "DOES NOT FIT" in text and "rehearsed; " in text and "where the step's time goes" in text


def test_a_search_tells_overrides_and_writes_its_page(ran: Any) -> None:
    code, text = ran[0][2]
    assert code == 0 and "unchanged" in text and "1: " in text and "why: " in text
    assert "Layouts of llama_tiny" in ran[1].read_text()


def test_bad_input_ends_with_2(ran: Any) -> None:
    assert ran[0][3][0] == 2 and "--tokens -1" in ran[0][3][1]
    assert ran[0][4][0] == 2 and "context_parallel_size" in ran[0][4][1]


def test_the_example_of_its_help_is_a_plan_with_days_and_cost(ran: Any) -> None:
    code, text = ran[0][5]
    assert code == (0 if "\nFITS" in text else 1)
    assert "on 64 x H100" in text and "1e+12 tokens: " in text and "at 2.5 per GPU hour" in text
