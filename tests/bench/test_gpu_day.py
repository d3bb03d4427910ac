# SPDX-License-Identifier: Apache-2.0
"""The plan of a first day with a GPU: its time, and what is left of a step that is cut off."""

import sys
from pathlib import Path

from bench.gpu.day import Step, page, steps, take

FACTS = {"device": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.15.0"}, "clocks": {}}


def test_the_plan_fits_into_one_call_of_ten_minutes() -> None:
    for toy in (False, True):
        assert sum(step.seconds for step in steps(toy=toy)) <= 600


def step(code: str, answer: str | None = None) -> Step:
    return Step(name="a step", question="?", seconds=60, command=[sys.executable, "-c", code, "{work}"], page=answer)


def test_a_step_that_is_cut_off_keeps_what_it_wrote(tmp_path: Path) -> None:
    code = "import sys, time; open(sys.argv[1] + '/gpu.md', 'w').write('# so far'); time.sleep(100)"
    answer = take(step(code, "gpu.md"), tmp_path / "cut", seconds=5)
    assert answer["state"].startswith("cut off") and "# so far" in answer["text"]
    failed = take(step("print('why'); raise SystemExit(3)"), tmp_path / "failed", seconds=60)
    assert "3" in failed["state"] and "why" in failed["text"]


def test_a_page_names_what_was_not_reached_and_tells_no_time_of_a_pretend_gpu() -> None:
    first, second = step(""), Step(name="another", question="?", seconds=60, command=[])
    answers = [{"step": first, "state": "done", "text": "# 12.5 ms", "seconds": 7.0}]
    real = page(FACTS, answers, [first, second])
    assert "12.5 ms" in real and "7 s" in real and "| another | ? | not reached |" in real
    pretended = page(FACTS | {"device": "NVIDIA H100 80GB HBM3 (pretend)"}, answers, [first, second])
    assert pretended.startswith("A pretend GPU") and "12.5 ms" not in pretended and "7 s" not in pretended
