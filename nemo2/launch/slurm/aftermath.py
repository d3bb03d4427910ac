# SPDX-License-Identifier: Apache-2.0
"""Decides after a life of a job whether the run is done, continues, or has failed for a reason that a restart doesn't
fix.

The job's script runs this module on its node. It prints one word, ``done``, ``again``, ``failed`` or ``cancelled``, and
writes the word with its reason into ``state.json``, which a launcher that follows the run reads. Imports nothing heavy.

- A run that an earlier life has trained to the end, before its node was lost or while it was cut off: done.
- Ranks that saved and stopped on request: again, but not `ASKED` times in a row at one step.
- Ranks that ended because Slurm took a node from them, or the job back: again.
- An error of the settings, the data or the checkpoint: failed, because the next start would meet it too.
- Ranks that Slurm ended before they wrote anything, as at the return of a lost node: again, but not `STALLED` times in
  a row.
- Any other failure (a lost node, a killed rank, a hang, an exception): again, unless an earlier life failed at the same
  step, or `STALLED` lives in a row advanced no further than a life before them.
- Ranks that never began to run: failed.
- A failure after as many failed starts as the executor allows (``retries``): failed.
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any, Optional

from nemo2.errors import Preempted, RunFinished
from nemo2.launch.deaths import deaths_in, killed_by
from nemo2.launch.slurm.script import LIVES, STATE
from nemo2.run_dir.faults import HANG, MENDED_BY_A_START, Fault, read_faults
from nemo2.run_dir.records import read_metrics, write_text

STALLED = 3
ASKED = 10
RUN_DIR = "run_dir"
"""A file in the job's folder with the path of the run directory."""
_ENDED_BY_SLURM = ("CANCELLED",)
_TAKEN_BY_SLURM = ("NODE_FAIL", "PREEMPTED", "REQUEUED")
"""States of a job that Slurm itself queues again. Errors of its ranks in these states don't count as failures."""
_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT")


def judge(
    folder: Path, *, life: int, code: int, state: str = "RUNNING", retries: Optional[int] = None
) -> dict[str, Any]:
    """The end of a life: ``verdict``, ``message``, ``step`` (None: no step began), and ``rank`` if one rank caused the
    end.

    Args:
        folder: The job's folder.
        life: The life's number.
        code: The exit code of srun.
        state: Slurm's current word for the job.
        retries: How often a failed job is started again. None: as long as it makes progress.
    """
    faults = read_faults(folder / LIVES / str(life) / "faults")
    if code == 0:
        return _outcome("done", "trained to the end", faults, folder)
    if life > 0 and faults and faults[0].kind == RunFinished.__name__:
        return _outcome("done", "an earlier start trained to the end", faults, folder)
    stopped = next((fault for fault in faults if fault.kind == Preempted.__name__), None)
    if state.startswith(_ENDED_BY_SLURM):
        return _outcome("cancelled", stopped.message if stopped else "cancelled", faults, folder)
    if stopped is not None:
        return _asked_to_stop(_outcome("again", stopped.message, faults, folder), folder)
    if state.startswith(_TAKEN_BY_SLURM) and not (faults and _explained(faults[0])):
        return _outcome("again", f"Slurm took the job from its nodes ({state}).", faults, folder)
    message, rank = _first_words(folder / LIVES / str(life), faults, code)
    outcome = _outcome("again", message, faults, folder, rank=rank)
    if not faults and _ended_by_slurm(folder / LIVES / str(life)):
        before = history(folder)[1 - STALLED :]
        again = sum(one.get("ended", False) and one["step"] == outcome["step"] for one in before) < STALLED - 1
        return {**outcome, "verdict": "again" if again else "failed", "ended": True}
    if not any((folder / LIVES / str(life)).glob("rank-*.out")):
        return {**outcome, "verdict": "failed"}
    if faults and _explained(faults[0]):
        return {**outcome, "verdict": "failed"}
    earlier = [one for one in history(folder) if one.get("failed")]
    if retries is not None and len(earlier) >= retries:
        message = f"{message} {retries + 1} starts have failed (executor.retries={retries})."
        return {**outcome, "verdict": "failed", "message": message}
    if any(one.get("step") == outcome["step"] for one in earlier):
        at = "before its first step" if outcome["step"] is None else f"at step {outcome['step']}"
        return {
            **outcome,
            "verdict": "failed",
            "message": f"{message} An earlier start also failed {at}, so the job does not start again.",
        }
    if _stalled([*earlier, outcome]):
        return {**outcome, "verdict": "failed", "message": f"{message} {STALLED} starts in a row made no progress."}
    return {**outcome, "failed": True}


def history(folder: Path) -> list[dict[str, Any]]:
    """The verdicts so far, oldest first."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))["lives"]
    except (OSError, ValueError, KeyError):
        return []


def record(folder: Path, life: int, outcome: dict[str, Any]) -> None:
    state = {"again": "continued"}.get(outcome["verdict"], outcome["verdict"])
    lives = [*history(folder), {"life": life, "at": round(time.time(), 1), **outcome}]
    write_text(folder / STATE, json.dumps({"state": state, "lives": lives}, indent=1) + "\n")


def _asked_to_stop(outcome: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The verdict of a life that was asked to stop, unless too many such lives made no progress."""
    outcome = {**outcome, "asked": True}
    before = history(folder)[1 - ASKED :]
    if sum(one.get("asked", False) and one["step"] == outcome["step"] for one in before) < ASKED - 1:
        return outcome
    message = f"{outcome['message']} {ASKED} starts in a row were asked to stop at this step. Set a longer time limit."
    return {**outcome, "verdict": "failed", "message": message}


def _explained(fault: Fault) -> bool:
    """Whether a restart would meet the fault too."""
    return fault.explained and fault.kind not in MENDED_BY_A_START


def _ended_by_slurm(life: Path) -> bool:
    """Whether slurmd reports that it cancelled the ranks' step."""
    return any(
        _CANCELLED.search(path.read_text(encoding="utf-8", errors="replace")) for path in life.glob("task-*.out")
    )


def _stalled(failures: list[dict[str, Any]]) -> bool:
    """Whether the last failures advanced no further than the one before them."""
    steps = [-1 if one["step"] is None else one["step"] for one in failures]
    return len(steps) > STALLED and max(steps[-STALLED:]) <= max(steps[:-STALLED])


def _outcome(
    verdict: str, message: str, faults: list[Fault], folder: Path, *, rank: Optional[int] = None
) -> dict[str, Any]:
    steps = [fault.step for fault in faults if fault.step is not None]
    return {"verdict": verdict, "message": message, "step": max(steps) if steps else _last_step(folder), "rank": rank}


def _last_step(folder: Path) -> Optional[int]:
    """The steps that the run directory reports. None: none."""
    try:
        directory = (folder / RUN_DIR).read_text(encoding="utf-8").strip()
        return max(record["step"] + 1 for record in read_metrics(directory) if "step" in record)
    except (OSError, ValueError):
        return None


def _first_words(life: Path, faults: list[Fault], code: int) -> tuple[str, Optional[int]]:
    """The first failure among the ranks in a sentence, and its rank."""
    output = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(life.glob("task-*.out"))]
    if not faults or faults[0].kind != HANG:
        for death in deaths_in("\n".join(output)):
            if words := killed_by(death):
                return words, death.rank
    if faults:
        fault = faults[0]
        return (
            fault.message if fault.kind == HANG else f"rank {fault.rank} failed first: {fault.kind}: {fault.message}"
        ), fault.rank
    lines = [line for text in output for line in text.splitlines() if line.strip()]
    last = f". Last output: {' / '.join(lines[-3:])}" if lines else ""
    return f"the ranks ended with exit code {code} and no error message{last}.", None


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge a life of a job.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--state", default="RUNNING")
    parser.add_argument("--retries", type=int, default=None)
    given = parser.parse_args()
    outcome = judge(given.folder, life=given.life, code=given.code, state=given.state, retries=given.retries)
    record(given.folder, given.life, outcome)
    print(outcome["message"])
    print(outcome["verdict"])


if __name__ == "__main__":
    main()
