# SPDX-License-Identifier: Apache-2.0
"""All that a first day with a GPU should tell, in one call of ten minutes: `make gpu-day`.

    python -m bench.gpu.day                      # bench/results/DATE-day-DEVICE.md

Steps run in the order of interest, each in processes of its own that end with its time. The page is written after each of them,
so that a call that is cut off loses what it hadn't reached. On a pretend GPU (support/pretend_gpu) sizes are toys, and the page
tells what ran and no time.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.report import is_pretend

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
SPEED = ["--arms", "ours", "bare", "--repeats", "2", "--steps", "12", "--warm-up", "4"]
TOYS = ["--toy", "--repeats", "1", "--steps", "4", "--warm-up", "1"]
CASES = ("llama32_1b/4096/bf16", "llama3_8b/8192/bf16", "llama3_8b/8192/fp8-current")

ENDED = "cut off with the call"
"""The state of the step that ran when the call was interrupted or terminated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One question.

    Attributes:
        seconds: after which its processes are ended, with what earlier steps left of theirs.
        command: the program and its arguments, with ``{work}`` for a folder of its own.
        page: a file in that folder that answers; None: the end of what the command printed.
    """

    name: str
    question: str
    seconds: float
    command: list[str]
    page: str | None = None


def steps(*, toy: bool) -> list[Step]:
    """The plan; its times add up to less than ten minutes."""
    tests = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    speed = [PYTHON, "-m", "bench.gpu", "--output", "{work}", *(TOYS if toy else SPEED), "--only"]
    nemo2 = [PYTHON, "-m", "nemo2"]
    alone = ["strategy.tensor_model_parallel_size=1", "strategy.sequence_parallel=False", "--devices", "1"]
    tiny = ["pretrain", "llama_tiny", "trainer.max_steps=5", *alone, "--dir", "{work}", "--name", "smoke", "-y"]
    profile = [PYTHON, "-m", "bench.gpu.profile", *(["--toy"] if toy else [])]
    return [
        Step(name="set-up", question="Is the machine complete?", seconds=40, command=[*nemo2, "doctor"]),
        Step(name="smoke", question="Does a recipe train, validate and save?", seconds=60, command=[*nemo2, *tiny]),
        Step(
            name="parity",
            question="Does it train as on the CPU, and go on there and back?",
            seconds=100,
            command=[*tests, "-k", "plain_ones or cpu_to_the_gpu"],
        ),
        Step(
            name="speed",
            question="What does nemo2 cost over a bare loop, what share of the chip does it reach, and what does fp8 gain?",
            seconds=200,
            command=[*speed, *(["llama32_1b"] if toy else CASES)],
            page="gpu.md",
        ),
        Step(
            name="memory",
            question="Do the recipes for one GPU take what their rehearsal counts?",
            seconds=80,
            command=[PYTHON, "-m", "bench.gpu.memory", *(["--toy"] if toy else [])],
        ),
        Step(name="profile", question="What is hidden behind computation?", seconds=40, command=profile),
        Step(
            name="graphs",
            question="Do captured steps train the same?",
            seconds=80,
            command=[*tests, "-x", "-k", "captured"],
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the page")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    parser.add_argument("--patience", type=float, default=1.0, help="this many times each step's time (a slow machine)")
    arguments = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("This machine has no GPU.", file=sys.stderr)
        return 2
    from bench.gpu.__main__ import clocks, installed_versions

    device = torch.cuda.get_device_name()
    plan = [step for step in steps(toy=is_pretend(device)) if not arguments.only or step.name in arguments.only]
    if not plan:
        parser.error(f"--only: the steps are {', '.join(step.name for step in steps(toy=False))}")
    file = arguments.output / f"{time.strftime('%Y-%m-%d')}-day-{slug(device)}.md"
    facts = {"device": device, "versions": installed_versions(), "clocks": clocks()}
    answers = run(plan, facts, file, patience=arguments.patience)
    print(file)
    return 1 if any(answer["state"] != "done" for answer in answers) else 0


def run(plan: list[Step], facts: dict[str, Any], file: Path, *, patience: float = 1.0) -> list[dict[str, Any]]:
    """Run the steps and write the page after each. What a step leaves of its time is the next one's."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # how a call ends whose time is up
    answers: list[dict[str, Any]] = []
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for step in plan:
            print(f"{step.name}: {step.question}", flush=True)
            seconds += patience * step.seconds
            answer = take(step, Path(folder) / slug(step.name), seconds=seconds)
            seconds = max(seconds - answer["seconds"], 0)
            answers.append({"step": step, **answer})
            print(f"{step.name}: {answer['state']} ({answer['seconds']:.0f} s)", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(page(facts, answers, plan))
            if answer["state"] == ENDED:
                break
    return answers


def take(step: Step, work: Path, *, seconds: float) -> dict[str, Any]:
    """Run a step. ``state``: "done", or what went wrong; ``text``: its answer, as far as it got."""
    work.mkdir(parents=True)
    log = work / "output.txt"
    command = [part.format(work=work) for part in step.command]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _joined(str(ROOT), os.environ.get("PYTHONPATH"))}
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            state = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            state = f"cut off after {seconds:.0f} s"
        except (KeyboardInterrupt, SystemExit):
            state = ENDED
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
    printed = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    answer = work / step.page if step.page else None
    found = answer.read_text() if answer and answer.is_file() else None
    ended = "\n".join(printed.splitlines()[-25:])
    parts = [found] if found else []
    if found is None or state != "done":
        parts.append(f"```text\n{ended}\n```\n")
    return {"state": state, "text": "\n".join(parts), "seconds": time.monotonic() - started}


def page(facts: dict[str, Any], answers: list[dict[str, Any]], plan: list[Step]) -> str:
    """The page so far."""
    pretend = is_pretend(facts["device"])
    lines = []
    if pretend:
        lines += ["A pretend GPU: this says that the steps run, and nothing about a GPU.", ""]
    lines += [f"# {facts['device']}, {time.strftime('%d %B %Y')}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in facts["versions"].items()) + ".", ""]
    if facts["clocks"]:
        lines += ["; ".join(f"{name} {value}" for name, value in facts["clocks"].items()) + ".", ""]
    lines += ["Made by `python -m bench.gpu.day`.", "", "| step | question | |", "|---|---|---|"]
    for answer in answers:
        seconds = "" if pretend or not answer["seconds"] else f" in {answer['seconds']:.0f} s"
        lines.append(f"| {answer['step'].name} | {answer['step'].question} | {answer['state']}{seconds} |")
    lines += [f"| {step.name} | {step.question} | not reached |" for step in plan[len(answers) :]]
    for answer in answers:
        if answer["text"] and not (pretend and answer["state"] == "done"):
            text = re.sub(r"^#", "###", answer["text"], flags=re.MULTILINE)
            lines += ["", f"## {answer['step'].name}", "", text.rstrip()]
    return "\n".join(lines) + "\n"


def slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _joined(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
