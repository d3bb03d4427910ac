# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the commands a user would type, one after another, and a check of what they claim.

Trains ``llama_tiny`` on two CPU processes (or GPUs, where there are any), interrupts it as Ctrl-C would once it has saved,
starts it again with the same command, and has the result write Python. Exits non-zero if a command fails, the run does not
go on where it stopped, or the losses do not fall.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path("demo_run")
NAME = "llama_tiny"
PRETRAIN = f"nemo2 pretrain llama_tiny --devices 2 --dir {RUNS} --name {NAME}"
PROMPTS = ("def main(", "class Reader", "import os")

LOSS_LEFT = 0.6
"""At the end the training loss must be below this share of its start."""


def main() -> None:
    os.chdir(ROOT)
    # As in an activated environment, without asking the user to activate it.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)

    say("Train a Llama of 4 M parameters on Python's standard library, tensor-parallel over two processes.")
    stopped_at = train_and_interrupt(PRETRAIN)
    say(f"Stopped, as Ctrl-C would, with a checkpoint at step {stopped_at}. The same command goes on from there.")
    run(PRETRAIN)
    run_dir = next((RUNS / NAME).glob("*/metrics.jsonl")).parent

    say("What has it learnt?")
    prompts = " ".join(f"--prompt {shlex.quote(prompt)}" for prompt in PROMPTS)
    text = run(f"nemo2 generate {run_dir} {prompts} --max-new-tokens 48 --temperature 0.6 --top-p 0.9", capture=True)

    say("Is it true?")
    check(run_dir, stopped_at=stopped_at, text=text)
    print(f"\nDone in {time.monotonic() - started:.0f} s. Look at")
    for name in ("loss_curve.svg", "report.html", "metrics.jsonl", "checkpoints"):
        claim((run_dir / name).exists(), f"{run_dir / name}")


def train_and_interrupt(command: str) -> int:
    """Start `command`, interrupt it once a checkpoint is finished; returns the checkpoint's step."""
    print(f"$ {command}", flush=True)
    process = subprocess.Popen(shlex.split(command), start_new_session=True)
    try:
        while (code := process.poll()) is None:
            if steps := finished_steps():
                time.sleep(5)  # so that there are steps to be lost and done again
                process.send_signal(signal.SIGINT)
                code = process.wait(timeout=120)
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"demo: the run ended with exit code {code} before its first checkpoint")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if code != 130:
        raise SystemExit(f"demo: an interrupted run should end with exit code 130, this one ended with {code}")
    return max(steps | finished_steps())


def run(command: str, *, capture: bool = False) -> str:
    """Run `command` and show its output; returns it if it is captured. A failure ends the demo."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE if capture else None, text=True)
    if capture:
        print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"demo: the command above ended with exit code {done.returncode}")
    return done.stdout or ""


def check(run_dir: Path, *, stopped_at: int, text: str) -> None:
    """Hold the run against what it is said to show."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["reduced_train_loss"] for line in lines if "reduced_train_loss" in line}
    validation = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    first, last = min(losses), max(losses)
    claim(
        losses[last] < LOSS_LEFT * losses[first],
        f"the training loss falls from {losses[first]:.2f} (step {first}) to {losses[last]:.2f} (step {last}), "
        f"below {LOSS_LEFT:.0%} of its start",
    )
    values = [validation[step] for step in sorted(validation)]
    claim(
        len(values) > 2 and values[-1] < values[0],
        f"the validation loss falls: {', '.join(f'{value:.2f}' for value in values)}",
    )
    claim(last + 1 >= 200, f"{last + 1} steps are done")
    before, after = (
        max(step for step in losses if step < stopped_at),
        min(step for step in losses if step >= stopped_at),
    )
    claim(
        abs(losses[after] - losses[before]) < 0.1 * losses[first] and sorted(losses) == list(losses),
        f"the resumed run goes on where it was: loss {losses[before]:.2f} at step {before}, {losses[after]:.2f} at step {after}",
    )
    words = re.findall(r"\b(?:def|self|return|import|if|for|in|None|class|not|raise|from|else|is)\b|[()=:.\[\]]", text)
    claim(len(words) > 20 and "def " in text, f"the text looks like Python: {len(words)} of its keywords and signs")


def finished_steps() -> set[int]:
    """Steps of the checkpoints that are whole: a checkpoint gets its name when it is."""
    found = (RUNS / NAME).glob("*/checkpoints/*/manifest.json")
    return {json.loads(path.read_text())["step"] for path in found if not path.parent.name.startswith(".")}


def claim(true: bool, what: str) -> None:
    print(f"  {'ok   ' if true else 'FALSE'} {what}", flush=True)
    if not true:
        raise SystemExit("demo: that is not so")


def say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


if __name__ == "__main__":
    main()
