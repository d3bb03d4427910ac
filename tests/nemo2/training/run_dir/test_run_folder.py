# SPDX-License-Identifier: Apache-2.0
"""What a run's files tell, of one run and of several side by side."""

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from nemo2 import recipes
from nemo2.base.errors import DataError
from nemo2.config import to_json
from nemo2.launch.result import RunResult
from nemo2.training.run_dir.compare import differences, labels, losses_at_one_step
from nemo2.training.run_dir.run_folder import RunFolder
from support.saved_checkpoints import saved

Make = Callable[..., RunFolder]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)

    def make(
        name: str, *, steps: int = 4, factor: float = 1.0, start: str = "2026-01-01_00-00-00", **fields: Any
    ) -> RunFolder:
        folder = tmp_path / "runs" / name / start
        folder.mkdir(parents=True)
        lines: list[dict[str, Any]] = [
            {"step": s, "reduced_train_loss": factor * (8 - s), "train_step_timing": 0.5, "tokens_per_second": 100.0}
            for s in range(steps)
        ]
        lines.append({"step": steps - 1, "val_loss": factor * 5})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "effective_config.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": 4}}))
        recipe: Any = recipes.get("llama_tiny").pretrain_recipe()
        recipe.log.name = name
        for field, value in fields.items():
            setattr(recipe.trainer, field, value)
        (folder / "recipe.json").write_text(to_json(recipe))
        return RunFolder(folder)

    return make


def test_metrics_are_a_table_with_a_row_for_each_step(made):
    run = made("first")
    table = run.metrics
    assert list(table.index) == [0, 1, 2, 3] and list(table["reduced_train_loss"]) == [8, 7, 6, 5]
    assert table["val_loss"].dropna().to_dict() == {3: 5.0} and (run.steps, run.planned_steps) == (4, 4)


def test_steps_after_the_newest_record_are_counted_by_checkpoints(made, command):
    """A run logs every few steps, so its last steps may have no record."""
    run = made("first", steps=3)
    assert run.steps == 3
    saved(run / "checkpoints" / "step=2", 2)
    assert run.steps == 3
    saved(run / "checkpoints" / "step=4", 4)
    assert run.steps == 4
    assert " 4 of 4 " in command("runs list").out


def test_following_ends_when_no_further_record_will_come(made, command):
    run = made("first", steps=3)
    (run / "effective_config.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": 4, "log_every_n_steps": 3}}))
    command("runs tail first --follow")


def test_before_the_first_step_there_is_nothing_and_no_error(tmp_path):
    run = RunFolder(tmp_path)
    assert run.records == [] and len(run.metrics) == 0 and run.steps == 0 and run.planned_steps is None
    assert run.best_checkpoint is None and run.last_checkpoint is None and run.checkpoints == []
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        _ = run.report
    with pytest.raises(DataError, match="has no metric lr. Its metrics: none yet"):
        run.plot("lr")


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([{"val_loss": 3.0}, {"val_loss": 2.0}, {"val_loss": 2.5}], 2),
        ([{"val_loss": 2.0}, {"val_loss": 2.0}, {}], 2),
        ([{"reduced_train_loss": 1.0}, {"reduced_train_loss": 2.0}, {}], 1),
        ([{"val_loss": 3.0, "reduced_train_loss": 9.0}, {"reduced_train_loss": 1.0}, {}], 1),
        ([{}, {}, {}], 3),
    ],
)
def test_the_best_checkpoint_is_the_lowest_loss_and_the_latest_of_equals(made, losses, best):
    run = made("first")
    paths = [
        saved(run / "checkpoints" / f"step={step}", step, metrics=metrics)
        for step, metrics in enumerate(losses, start=1)
    ]
    (run / "checkpoints" / "torn").mkdir()
    assert run.best_checkpoint == paths[best - 1] and run.last_checkpoint == paths[-1] and run.checkpoints == paths


def test_it_is_a_path_that_travels(made):
    run = made("first")
    assert isinstance(run, Path) and run == Path(run) and f"{run}" == str(Path(run))
    for again in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert type(again) is RunFolder and again == run and again.steps == 4


def test_curves_are_drawn_and_written(made, tmp_path):
    run = made("first")
    chart = run.plot("train_step_timing", "reduced_train_loss", "tokens_per_second")
    assert chart._repr_svg_() == chart and "tokens_per_second 100" in chart
    ElementTree.fromstring(chart.save(tmp_path / "c.svg").read_text())
    assert "reduced_train_loss 5" in run.plot() and "val_loss 5" in run.plot()
    with pytest.raises(DataError, match=r"has no metric nothing\. Its metrics: .*tokens_per_second"):
        run.plot("nothing")
    with pytest.raises(DataError, match=r"ends in \.svg"):
        chart.save(tmp_path / "c.png")


def test_a_launchs_result_tells_what_its_run_does(made):
    run = made("first")
    best = saved(run / "checkpoints" / "step=4", 4, metrics={"val_loss": 1.0})
    result = RunResult(status="succeeded", exit_code=0, experiment_id="x", run_dir=Path(run))
    assert list(result.metrics["reduced_train_loss"]) == [8, 7, 6, 5] and result.best_checkpoint == best
    assert result.report.read_text().startswith("<!doctype html>") and "val_loss" in result.plot()
    with pytest.raises(DataError, match=r"x \(dryrun\) has no run directory on this machine"):
        _ = RunResult(status="dryrun", exit_code=0, experiment_id="x").metrics


def test_runs_are_compared_at_the_last_step_that_all_have(made):
    first, second = made("first", steps=4), made("second", steps=3, factor=2.0)
    assert losses_at_one_step([first, second]) == (2, [6.0, 12.0])
    assert losses_at_one_step([first, RunFolder(first.parent)]) is None
    assert labels([first, second]) == ["first", "second"]
    again = made("first", start="2026-01-02_00-00-00")
    assert labels([first, again]) == ["first/2026-01-01_00-00-00", "first/2026-01-02_00-00-00"]


def test_settings_that_differ_are_those_of_any_two():
    recipe: Any = [recipes.get("llama_tiny").pretrain_recipe() for _ in range(3)]
    recipe[1].trainer.max_steps = 7
    recipe[2].optim.config.lr = 1.0
    recipe[2].log.name = "other"
    lr = recipe[0].optim.config.lr
    steps = recipe[0].trainer.max_steps
    assert differences(recipe) == [("trainer.max_steps", [steps, 7, steps]), ("optim.config.lr", [lr, lr, 1.0])]


def test_the_command_lists_the_one_that_logged_last_first(made, command):
    assert "No runs below" in command("runs list").out
    for age, name in enumerate(("newest", "middle", "oldest")):
        metrics = made(name) / "metrics.jsonl"
        os.utime(metrics, (1e9 - age, 1e9 - age))
    names = [line.split()[0] for line in command("runs list").out.splitlines()[1:4]]  # below: submissions to Slurm
    assert names == ["newest", "middle", "oldest"]
    [told] = command("runs list mid* --json").json
    assert told["name"] == "middle" and told["loss"] == 5 and told["val_loss"] == 5 and told["step_s"] == 0.5
    assert "oldest" not in command("runs list --most 1").out


def test_the_status_of_a_run_on_this_machine_is_for_reading(made, command):
    metrics = made("mine", factor=1 / 3) / "metrics.jsonl"
    os.utime(metrics, (1e9, 1e9))
    told = dict(line.split(maxsplit=1) for line in command("runs status mine").out.splitlines())
    assert told["written"].startswith("2001-09-") and told["loss"] == "1.6667"


def test_the_command_compares(made, command, tmp_path):
    made("first")
    made("second", steps=3, factor=2.0, max_steps=7)
    made("third", factor=3.0)
    told = command("runs compare first second third --html page.html").out
    assert "loss at step 3: first 6, second 12, third 18" in told
    [line] = [line for line in told.splitlines() if line.startswith("trainer.max_steps")]
    assert line.split()[1:] == ["300", "7", "300"]
    page = (tmp_path / "page.html").read_text()
    assert (
        "<h2>Curves</h2>" in page and "trainer.max_steps" in page and 'class="s2"' in page and ".picture .s2{" in page
    )
    told = command("runs compare first second --json").json
    assert told["at_one_step"] == {"step": 2, "loss": {"first": 6.0, "second": 12.0}}
    assert told["settings"]["trainer.max_steps"] == {"first": "300", "second": "7"}


def test_runs_of_a_recipe_that_cannot_be_read_are_compared_without_it(made, command):
    made("first")
    (made("second") / "recipe.json").write_text("{}")
    assert "Can't compare the settings: " in command("runs compare first second").out


def test_the_command_shows_the_last_records(made, command):
    made("first")
    told = command("runs tail first --lines 2").out.splitlines()
    assert told == [
        "step 4 of 4 | reduced_train_loss: 5 | tokens_per_second: 100 | train_step_timing: 0.5",
        "step 4 of 4 | val_loss: 5",
    ]
    assert command("runs tail first --json --lines 1").json == {"step": 3, "val_loss": 5}
    command("runs tail first --follow")
    assert "two to eight" in command("runs compare first", code=2).err
    assert "named twice" in command("runs compare first first", code=2).err
    command("runs tail nothing", code=2)
