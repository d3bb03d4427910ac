# SPDX-License-Identifier: Apache-2.0
"""A run that was killed after a save and before the step's line in ``metrics.jsonl`` gets the line when it is resumed."""

from types import SimpleNamespace

import pytest

from nemo2.training.run_dir.callback import RunDirectoryCallback
from nemo2.training.run_dir.directory import RunDirectory
from nemo2.training.run_dir.metrics import JSONLLogger, read_metrics
from support.saved_checkpoints import saved

VALUES = {"global_step": 2.0, "reduced_train_loss": 1.5, "lr": 0.1, "val_loss": 9.0}
LINE = {"step": 2, "reduced_train_loss": 1.5, "lr": 0.1, "consumed_samples": 24}


@pytest.mark.parametrize(
    ("told", "values", "of_this_run", "every", "expected"),
    [
        (2, VALUES, True, 1, LINE),
        (3, VALUES, True, 1, None),
        # Logged at an earlier step, and not at the one that was saved.
        (2, VALUES | {"global_step": 1.0}, True, 1, None),
        (2, VALUES, True, 2, None),
        # Preempted in the first step that is logged: there is no metrics.jsonl yet.
        (0, VALUES, True, 1, LINE),
        (0, VALUES, False, 1, None),
    ],
    ids=["lost", "there", "never logged", "a step without a line", "lost with the file", "another run's checkpoint"],
)
def test_a_line_that_was_lost_comes_from_the_checkpoint(tmp_path, told, values, of_this_run, every, expected):
    run = RunDirectory(log_dir=tmp_path / "run", exp_dir=tmp_path, name="run", version=None, resumed=True)
    folder = run.checkpoints if of_this_run else tmp_path / "other" / "checkpoints"
    checkpoint = saved(folder / "step=3", 3, metrics=values)
    metrics = JSONLLogger(str(run.log_dir))
    for step in range(told):
        metrics.log_metrics({"global_step": float(step), "reduced_train_loss": 2.0})
    trainer = SimpleNamespace(ckpt_path=str(checkpoint), global_step=3, log_every_n_steps=every)
    RunDirectoryCallback(run, metrics)._complete_metrics(trainer)
    records = read_metrics(metrics.path) if metrics.path.exists() else []
    expected_lines = [expected] if expected is not None else []
    assert [record["step"] for record in records] == [*range(told), *(line["step"] for line in expected_lines)]
    assert records[told:] == expected_lines
