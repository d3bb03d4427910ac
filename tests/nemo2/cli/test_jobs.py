# SPDX-License-Identifier: Apache-2.0
"""`nemo2 runs`, over submissions that are written down and a squeue that answers. On a real Slurm: `make cluster`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo2.launch.slurm.job_result import RUN_DIR
from nemo2.launch.slurm.progress import Progress, progress, span
from nemo2.launch.slurm.script import STATE
from nemo2.launch.slurm.shell import shell_of
from nemo2.launch.slurm.submission import Submission
from nemo2.training.run_dir.records import to_line


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a submitted job that runs, and has logged four steps of ten in a run directory with a blank in its path."""
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "squeue").write_text("#!/bin/sh\necho RUNNING\n")
    (binaries / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(binaries), prepend=":")
    folder, run = tmp_path / "jobs" / "mine_1", tmp_path / "my runs" / "first"
    folder.mkdir(parents=True)
    run.mkdir(parents=True)
    Submission(name="mine", folder=str(folder), jobs=["7"]).save()
    (folder / RUN_DIR).write_text(f"{run}\n")
    (folder / STATE).write_text(json.dumps({"lives": [{"life": 0, "verdict": "again", "message": "node1 was lost"}]}))
    lines: list[dict[str, Any]] = [
        {"step": step, "reduced_train_loss": 4.0 - step, "train_step_timing": 30.0 + step, "tokens_per_second": 1234.5}
        for step in range(4)
    ]
    lines.insert(2, {"step": 1, "val_loss": 3.25})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    (run / "effective_config.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": 10}}))
    return folder


def test_status_tells_how_far_a_run_is_and_when_it_will_be_done(job, command):
    told = command("runs status mine").out
    assert "mine: RUNNING (job 7)" in told and "life 0: again: node1 was lost" in told
    assert "step 4 of 10, loss 1, val loss 3.25, 31.5 s per step, 1,234 tokens per second, 3 min left" in told
    shown = command("runs status 7 --json").json
    assert shown["progress"]["seconds_left"] == 6 * 31.5 and shown["state"] == "RUNNING"
    assert shown["run_directory"].endswith("my runs/first") and shown["lives"][0]["life"] == 0


@pytest.mark.parametrize("last_life", [0, 1])
def test_status_says_why_a_run_has_ended_that_could_not_say_it_itself(job, command, last_life):
    """Its script and its ranks were killed together; a life before it has its verdict."""
    (job / STATE).write_text(
        json.dumps({"state": "continued", "lives": [{"life": 0, "verdict": "again", "message": "saved"}]})
    )
    (job / "lives" / str(last_life)).mkdir(parents=True)
    (job.parent.parent / "bin" / "squeue").write_text("#!/bin/sh\necho FAILED\n")
    (job / "job-7.out").write_text("slurmstepd: error: something was killed\n")
    told = command("runs status mine").out
    assert ("something was killed" in told) == bool(last_life)
    reason = command("runs status mine --json").json["reason"]
    assert reason is None if last_life == 0 else "FAILED" in reason and "scontrol requeue 7" in reason


def test_before_the_first_step_there_is_no_progress(job, command):
    run = Path((job / RUN_DIR).read_text().strip())
    (run / "metrics.jsonl").unlink()
    assert progress(shell_of(None), str(run)) is None
    (job / RUN_DIR).unlink()
    assert "step" not in command("runs status mine").out


def test_a_run_that_does_not_say_its_end_has_no_time_left(job):
    run = Path((job / RUN_DIR).read_text().strip())
    (run / "effective_config.yaml").write_text("trainer: {max_steps: -1}")
    told = progress(shell_of(None), str(run))
    assert told is not None and told.planned_steps is None and told.seconds_left is None
    assert str(told).startswith("step 4, loss 1") and "left" not in str(told)
    done = Progress(steps=10, planned_steps=10, loss=None, val_loss=None, step_seconds=1.0, tokens_per_second=None)
    assert done.seconds_left == 0 and str(done) == "step 10 of 10, 1 s per step"


def test_a_loss_that_is_not_a_number_is_shown_and_not_the_last_that_was(job):
    run = Path((job / RUN_DIR).read_text().strip())
    with open(run / "metrics.jsonl", "w") as metrics:
        metrics.write(
            to_line({"step": 0, "reduced_train_loss": 4.0}) + to_line({"step": 1, "reduced_train_loss": math.nan})
        )
    shown = progress(shell_of(None), str(run))
    assert shown is not None and shown.loss is not None and math.isnan(shown.loss)


def test_jobs_are_listed_with_their_states(job, command):
    assert command("runs list --submitted").out.splitlines()[1].split()[:3] == ["mine", "7", "RUNNING"]
    (job / STATE).write_text(json.dumps({"state": "done", "lives": []}))
    [told] = command("runs list --submitted --json").json
    assert (told["name"], told["jobs"], told["state"], told["folder"]) == ("mine", ["7"], "done", str(job))


def test_a_report_is_fetched(job, command):
    assert "mine has no report yet; `nemo2 runs status mine`" in command("runs report mine", code=2).err
    assert not Path("report.html").exists()
    (Path((job / RUN_DIR).read_text().strip()) / "report.html").write_text("<p>é\n")
    command("runs report mine -o page.html")
    assert Path("page.html").read_text() == "<p>é\n"


def test_an_unknown_name_is_told_with_the_nearest(job, command):
    assert "did you mean 'mine'" in command("runs status mne", code=2).err


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(5, "5 s"), (89, "89 s"), (600, "10 min"), (5400, "1 h 30 min"), (12000, "3 h 20 min"), (370800, "4 d 7 h")],
)
def test_spans_are_said_as_people_say_them(seconds, said):
    assert span(seconds) == said
