# SPDX-License-Identifier: Apache-2.0
"""The plan of a first day with a GPU: its time, and what is left of a step that is cut off."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.day import ROOT, Step, page, run, steps, take
from support.waiting import wait_until

FACTS = {"device": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.15.0"}, "clocks": {}}


def test_the_plan_fits_into_one_call_of_ten_minutes() -> None:
    for toy in (False, True):
        assert sum(step.seconds for step in steps(toy=toy)) <= 600


def step(code: str, answer: str | None = None) -> Step:
    return Step(name="a step", question="?", seconds=60, command=[sys.executable, "-c", code, "{work}"], page=answer)


def test_a_step_that_is_cut_off_keeps_what_it_wrote(tmp_path: Path) -> None:
    code = "import sys, time; open(sys.argv[1] + '/gpu.md', 'w').write('# so far'); time.sleep(100)"
    answer = take(step(code, "gpu.md"), tmp_path / "cut", seconds=2)
    assert answer["state"].startswith("cut off") and "# so far" in answer["text"]
    failed = take(step("print('why'); raise SystemExit(3)"), tmp_path / "failed", seconds=60)
    assert "3" in failed["state"] and "why" in failed["text"]


def test_a_call_that_is_terminated_keeps_its_page_and_leaves_no_process(tmp_path: Path) -> None:
    sleeper = "import os, sys, time; open(sys.argv[1] + '/../pid', 'w').write(str(os.getpid())); time.sleep(100)"
    code = f"""
import sys; from pathlib import Path; from bench.gpu.day import Step, run
plan = [Step(name=name, question="?", seconds=60, command=[sys.executable, "-c", code, {str(tmp_path)!r} + "/page"])
        for name, code in (("first", "print(5)"), ("second", {sleeper!r}), ("third", ""))]
run(plan, {FACTS!r}, Path({str(tmp_path / "page" / "day.md")!r}))"""
    (tmp_path / "page").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        wait_until(lambda: (tmp_path / "pid").is_file() and bool((tmp_path / "pid").read_text()))
        process.terminate()
    text = (tmp_path / "page" / "day.md").read_text()
    assert (
        "| first | ? | done" in text
        and "| second | ? | cut off with the call" in text
        and "| third | ? | not reached |" in text
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_time_that_a_step_leaves_is_the_next_one_s(tmp_path: Path) -> None:
    plan = [
        dataclasses.replace(step(""), seconds=30),
        dataclasses.replace(step("import time; time.sleep(0.5)"), name="next", seconds=0.1),
    ]
    assert [answer["state"] for answer in run(plan, FACTS, tmp_path / "day.md")] == ["done", "done"]


def test_a_page_names_what_was_not_reached_and_tells_no_time_of_a_pretend_gpu() -> None:
    first, second = step(""), Step(name="another", question="?", seconds=60, command=[])
    answers = [{"step": first, "state": "done", "text": "# 12.5 ms", "seconds": 7.0}]
    real = page(FACTS, answers, [first, second])
    assert "12.5 ms" in real and "7 s" in real and "| another | ? | not reached |" in real
    pretended = page(FACTS | {"device": "NVIDIA H100 80GB HBM3 (pretend)"}, answers, [first, second])
    assert pretended.startswith("A pretend GPU") and "12.5 ms" not in pretended and "7 s" not in pretended
