# SPDX-License-Identifier: Apache-2.0
"""A run that was killed after a save and before the step's line in ``metrics.jsonl`` gets the line when it is resumed."""

from pathlib import Path
from typing import Any

import pytest

from nemo2.checkpoint.directory import Manifest, publish, temporary_name
from nemo2.run_dir.callback import RunDirectoryCallback
from nemo2.run_dir.metrics import JSONLLogger, read_metrics

VALUES = {"global_step": 2.0, "reduced_train_loss": 1.5, "lr": 0.1, "val_loss": 9.0}


@pytest.mark.parametrize(
    ("told", "values", "expected"),
    [
        (2, VALUES, {"step": 2, "reduced_train_loss": 1.5, "lr": 0.1, "consumed_samples": 24}),
        (3, VALUES, None),
        # Logged at an earlier step, and not at the one that was saved.
        (2, VALUES | {"global_step": 1.0}, None),
    ],
    ids=["its line is lost", "its line is there", "it had no line"],
)
def test_a_line_that_was_lost_comes_from_the_checkpoint(
    tmp_path: Path, told: int, values: dict[str, float], expected: dict[str, Any] | None
) -> None:
    temporary = temporary_name(tmp_path / "step=3")
    temporary.mkdir()
    publish(temporary, tmp_path / "step=3", Manifest(step=3, consumed_samples=24, layout={}, metrics=values))
    metrics = JSONLLogger(str(tmp_path))
    for step in range(told):
        metrics.log_metrics({"global_step": float(step), "reduced_train_loss": 2.0})
    callback = RunDirectoryCallback(None, metrics)  # pyright: ignore[reportArgumentType]  (no run directory is needed)
    callback._complete_metrics(tmp_path / "step=3", 3)
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(told + (expected is not None)))
    if expected is not None:
        assert records[-1] == expected
