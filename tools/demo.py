# SPDX-License-Identifier: Apache-2.0
"""`make demo`: runs the commands that a user would type, and checks their results.

Trains ``llama_tiny`` tensor-parallel over two CPU processes or two GPUs, or on one GPU if there is only one. Interrupts the
run after its first save as Ctrl-C would, starts it again with the same command, and lets the model write Python. Exits
non-zero if a command fails, the run doesn't resume where it stopped, or the losses don't fall.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path("demo_run")
NAME = "llama_tiny"
PROMPTS = ("def main(", "class Reader", "import os")

ONE_RANK = ("strategy.tensor_model_parallel_size=1", "strategy.sequence_parallel=False")

LOSS_LEFT = 0.6
"""At the end the training loss must be below this share of its start."""


def layout() -> str:
    """Two ranks, as the recipe has it; on a machine with one GPU one rank, because a rank needs a GPU of its own."""
    one = torch.cuda.is_available() and torch.cuda.device_count() == 1
    return f"--devices 1 {' '.join(ONE_RANK)}" if one else "--devices 2"


def main() -> None:
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is ended
    # As in an activated environment, without asking the user to activate it.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)

    pretrain = f"nemo2 pretrain llama_tiny {layout()} --dir {RUNS} --name {NAME}"
    say("Train a Llama of 4 M parameters on Python's standard library.")
    stopped_at = train_and_interrupt(pretrain)
    say(f"Stopped, as Ctrl-C would, with a checkpoint at step {stopped_at}. Run the same command again to resume.")
    run(pretrain)
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
    """Start `command`, interrupt it once a checkpoint is finished; returns the step that it saved at its end."""
    with started(command) as process:
        while (code := process.poll()) is None:
            # A few steps later, so that the interruption isn't at the saved step.
            if (steps := finished_steps()) and last_logged_step() > max(steps):
                process.send_signal(signal.SIGINT)
                code = process.wait(timeout=120)
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"demo: the run ended with exit code {code} before it could be interrupted")
    if code != 130:
        raise SystemExit(f"demo: an interrupted run should end with exit code 130, this one ended with {code}")
    return max(steps | finished_steps())


def run(command: str, *, capture: bool = False) -> str:
    """Run `command` and show its output; returns it if it is captured. A failure ends the demo."""
    with started(command, stdout=subprocess.PIPE if capture else None, text=True) as process:
        output, _ = process.communicate()
    if capture:
        print(output, flush=True)
    if process.returncode:
        raise SystemExit(f"demo: the command above ended with exit code {process.returncode}")
    return output or ""


@contextmanager
def started(command: str, **options: Any) -> Iterator[subprocess.Popen]:
    """`command`, shown and started; ended with its own processes if the demo is."""
    print(f"$ {command}", flush=True)
    process = subprocess.Popen(shlex.split(command), **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=120)


def check(run_dir: Path, *, stopped_at: int, text: str) -> None:
    """Hold the run against what it is said to show."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = read_losses(run_dir / "metrics.jsonl")
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
    # An interrupted run saves before it ends, and the next start resumes from there.
    logged = [line for line in lines if "reduced_train_loss" in line]
    steps = [line["step"] for line in logged]
    claim(
        steps == sorted(set(steps)) and min(steps) < stopped_at < max(steps),
        f"it goes on at step {stopped_at}, where it was interrupted: no step is done twice",
    )
    batch = logged[0]["global_batch_size"]
    claim(
        all(line["consumed_samples"] == (line["step"] + 1) * batch for line in logged),
        f"no sample is left out or seen twice: {logged[-1]['consumed_samples']} in {last + 1} steps of {batch}",
    )
    words = re.findall(r"\b(?:def|self|return|import|if|for|in|None|class|not|raise|from|else|is)\b|[()=:.\[\]]", text)
    claim(len(words) > 20 and "def " in text, f"the text looks like Python: {len(words)} of its keywords and signs")


def finished_steps() -> set[int]:
    """Steps of the checkpoints that are whole: a checkpoint gets its name when it is."""
    found = (RUNS / NAME).glob("*/checkpoints/*/manifest.json")
    return {json.loads(path.read_text())["step"] for path in found if not path.parent.name.startswith(".")}


def last_logged_step() -> int:
    return max((step for path in (RUNS / NAME).glob("*/metrics.jsonl") for step in read_losses(path)), default=-1)


def read_losses(path: Path) -> dict[int, float]:
    """The training loss by step. A line that is being written is left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["reduced_train_loss"] for line in lines if "reduced_train_loss" in line}


def claim(true: bool, what: str) -> None:
    print(f"  {'ok   ' if true else 'FALSE'} {what}", flush=True)
    if not true:
        raise SystemExit("demo: that is not so")


def say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


if __name__ == "__main__":
    main()
