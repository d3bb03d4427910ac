# SPDX-License-Identifier: Apache-2.0
"""When a checkpoint is saved, what it is called and which ones are kept."""

import math
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.auto_resume import newest_to_resume
from nemo2.checkpoint.directory import finished
from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
from support import small_runs
from support.saved_checkpoints import saved


class FakeTrainer:
    """Saves as a trainer does, without a model."""

    def __init__(self) -> None:
        self.global_step = 0
        self.current_epoch = 0
        self.max_steps = 1000
        self.should_stop = False
        self.fit_loop = types.SimpleNamespace(max_epochs=-1)
        self.fast_dev_run = False
        self.is_global_zero = True
        self.ckpt_path = None
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.lightning_module = types.SimpleNamespace()
        self.state = types.SimpleNamespace(status="running")
        self.strategy = types.SimpleNamespace(
            consumed_samples=0,
            barrier=lambda: None,
            broadcast=lambda value: value,
            checkpoint_io=types.SimpleNamespace(maybe_finalize_save_checkpoint=lambda blocking: None),
        )
        self.saved: list[tuple[str, bool]] = []
        self.with_context: list[tuple[int, bool]] = []

    def at(self, step: int, **metrics: float) -> "FakeTrainer":
        self.global_step = step
        self.strategy.consumed_samples = 8 * step
        self.callback_metrics = {name: torch.tensor(value) for name, value in metrics.items()}
        return self

    def save_checkpoint(self, path: Path, weights_only: bool, storage_options: dict[str, Any]) -> None:
        saved(
            path,
            self.global_step,
            metrics=storage_options["metrics"],
            weights_only=weights_only,
            **(storage_options["run"] or {}),
        )
        self.saved.append((path.name, weights_only))
        self.with_context.append((self.global_step, storage_options["with_context"]))
        storage_options["published"](path)


def keeping(tmp_path: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"dirpath": str(tmp_path), "filename": "{step}", "verbose": False, **options})


def after(tmp_path: Path, losses: dict[int, float], **options: Any) -> tuple[list[str], ModelCheckpoint]:
    """Names left after saving at these steps with these validation losses."""
    callback = keeping(tmp_path, **options)
    trainer: Any = FakeTrainer()
    for step, loss in losses.items():
        callback.save(trainer.at(step, val_loss=loss))
    return sorted(path.name for path in tmp_path.iterdir()), callback


LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 6.0}


def test_a_run_in_the_directory_of_another_is_refused_before_its_first_step_and_a_second_fit_is_the_same_run(tmp_path):
    trainer: Any = FakeTrainer()
    first, second = (keeping(tmp_path, save_top_k=1, monitor=None) for _ in range(2))
    first.setup(trainer, trainer.lightning_module, "fit")
    for steps in ((1, 2), (3, 4)):
        first.on_train_start(trainer.at(steps[0] - 1), trainer.lightning_module)
        for step in steps:
            first.save(trainer.at(step))
    first.teardown(trainer, trainer.lightning_module, "fit")
    second.setup(trainer, trainer.lightning_module, "fit")
    with pytest.raises(CheckpointError, match="of run .* but this run is"):
        second.on_train_start(trainer.at(0), trainer.lightning_module)
    assert [path.name for path in tmp_path.glob("step*")] == ["step=4-last"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_top_k": 2}, ["step=2", "step=4", "step=5-last"]),
        ({"save_top_k": 2, "mode": "max"}, ["step=1", "step=5-last"]),
        ({"save_top_k": 2, "monitor": None}, ["step=4", "step=5-last"]),
        ({"save_top_k": 0}, ["step=5-last"]),
        ({"save_top_k": -1}, ["step=1", "step=2", "step=3", "step=4", "step=5-last"]),
        ({"save_top_k": 1, "save_last": False}, ["step=4", "step=5"]),
        ({"save_top_k": 2, "monitor": "unknown"}, ["step=4", "step=5-last"]),
    ],
)
def test_the_best_are_kept_and_always_the_newest(tmp_path, options, kept):
    names, callback = after(tmp_path, LOSSES, **options)
    assert names == kept
    assert Path(callback.last_model_path).name == kept[-1]
    assert Path(callback.best_model_path).exists()


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_ranks_last_and_retention_goes_on(tmp_path, mode, bad):
    names, callback = after(tmp_path, {1: 3.0, 2: bad, 3: bad, 4: bad}, save_top_k=1, mode=mode)
    assert names == ["step=1", "step=4-last"]
    assert callback.best_model_score == 3.0 and len(finished(tmp_path)) == 2


def test_a_checkpoint_that_can_be_resumed_outlives_newer_ones_that_cannot_until_the_run_is_complete(tmp_path):
    trainer: Any = FakeTrainer()
    trainer.max_steps = 6
    callback = keeping(tmp_path, save_weights_only=True, save_top_k=0)

    def after_saving(step: int, **options: Any) -> list[str]:
        callback.save(trainer.at(step), **options)
        return [path.name for path, _ in finished(tmp_path)]

    assert after_saving(1) == ["step=1-last"]
    assert after_saving(2, weights_only=False) == ["step=2-last"], "as a signal saves"
    assert after_saving(3) == ["step=2", "step=3-last"]
    assert after_saving(4) == ["step=2", "step=4-last"] and newest_to_resume(tmp_path) == tmp_path / "step=2"
    assert after_saving(5, weights_only=False) == ["step=5-last"]
    assert after_saving(6) == ["step=6-last"], "nothing is left to train"


def test_a_step_of_which_only_the_weights_are_saved_is_saved_again_for_a_signal(tmp_path):
    callback = keeping(tmp_path, save_weights_only=True)
    trainer: Any = FakeTrainer()
    for weights_only in (None, False, None, False):
        callback.save(trainer.at(4), weights_only=weights_only)
    assert trainer.saved == [("step=4-last", True), ("step=4-last", False)]
    assert [manifest.weights_only for _, manifest in finished(tmp_path)] == [False]


def test_the_best_is_known_by_path_and_score(tmp_path):
    _, callback = after(tmp_path, LOSSES, save_top_k=2)
    assert Path(callback.best_model_path).name == "step=4"
    assert callback.best_model_score == 2.0
    other = ModelCheckpoint()
    other.load_state_dict(callback.state_dict())
    assert (other.best_model_path, other.best_model_score) == (callback.best_model_path, 2.0)


def test_a_resumed_run_ranks_what_the_first_one_left(tmp_path):
    after(tmp_path, LOSSES, save_top_k=2)
    names, _ = after(tmp_path, {6: 2.5, 7: 9.0}, save_top_k=2)
    assert names == ["step=4", "step=6", "step=7-last"]


def test_a_run_that_goes_back_replaces_what_it_had_saved_and_keeps_its_new_attempt(tmp_path):
    trainer: Any = FakeTrainer()
    callback = keeping(tmp_path, save_top_k=3, monitor=None)

    def trained(*steps: int, start: str | None = None) -> list[str]:
        trainer.ckpt_path = tmp_path / start if start else None
        callback.on_train_start(trainer.at(steps[0] - 1), trainer.lightning_module)
        for step in steps:
            callback.save(trainer.at(step))
        return [path.name for path, _ in finished(tmp_path)]

    assert trained(2, 4, 6) == ["step=2", "step=4", "step=6-last"]
    callback.requested = tmp_path / "step=2"
    assert trained(5, start="step=2") == ["step=2", "step=4", "step=6", "step=5-last"], "the command names step 2 again"
    assert trained(6, start="step=5-last") == ["step=2", "step=6", "step=5", "step=6-last"]
    assert trained(7, start="step=6-last") == ["step=2", "step=5", "step=6", "step=7-last"]
    assert [len(manifest.returned_to) for _, manifest in finished(tmp_path)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("monitor", "validated", "logged", "warned"),
    [
        ("val_los", True, {"val_loss": 1.0}, True),
        ("accuracy", False, {"reduced_train_loss": 1.0}, True),
        ("val_accuracy", False, {"reduced_train_loss": 1.0}, False),  # the first validation may still log it
        ("reduced_train_loss", False, {"reduced_train_loss": 1.0}, False),
        ("val_loss", True, {"val_loss": 1.0}, False),
        ("accuracy", False, {}, False),  # nothing is logged yet
        (None, True, {"val_loss": 1.0}, False),
    ],
)
def test_a_monitored_metric_that_nobody_logs_is_reported_once(tmp_path, caplog, monitor, validated, logged, warned):
    callback = keeping(tmp_path, monitor=monitor)
    trainer: Any = FakeTrainer()
    for step in (1, 2):
        if validated:
            callback._validated_step = step
        callback.save(trainer.at(step, **logged))
    told = [record.getMessage() for record in caplog.records if "log.ckpt.monitor" in record.getMessage()]
    assert len(told) == warned
    assert all(
        repr(monitor) in words and set(logged) <= set(words.rstrip(".").replace(",", "").split()) for words in told
    )


def test_a_step_is_saved_once_and_never_before_the_first(tmp_path):
    callback = keeping(tmp_path)
    trainer: Any = FakeTrainer()
    callback.save(trainer)
    callback.save(trainer.at(4))
    callback.save(trainer)
    assert len(trainer.saved) == 1


@pytest.mark.parametrize(
    ("step", "options", "weights_only"),
    [
        (4, {}, True),
        (4, {"save_optim_on_train_end": True}, False),
        (4, {"save_optim_on_train_end": True, "save_weights_only": True}, False),
        (3, {}, False),
        (3, {"save_weights_only": True}, True),
    ],
)
def test_the_last_checkpoint_of_a_finished_run_holds_weights_only_unless_its_optimizer_is_kept(
    tmp_path, step, options, weights_only
):
    trainer: Any = FakeTrainer()
    trainer.max_steps = 4
    keeping(tmp_path, **options).on_train_end(trainer.at(step), trainer.lightning_module)
    assert trainer.saved == [(f"step={step}-last", weights_only)]


@pytest.mark.parametrize(
    ("always", "at_end", "max_steps", "expected"),
    [
        (True, False, 3, [(1, True), (2, True), (3, True)]),
        (False, False, 3, [(1, False), (2, False), (3, False)]),
        (False, True, 3, [(1, False), (2, False), (3, True)]),
        # Nothing foretold that training would end: the last checkpoint is saved again, with its context.
        (False, True, 1000, [(1, False), (2, False), (3, False), (3, True)]),
    ],
)
def test_the_context_is_saved_always_or_with_the_last_checkpoint_of_training(
    tmp_path, always, at_end, max_steps, expected
):
    callback = keeping(tmp_path, save_top_k=-1, always_save_context=always, save_context_on_train_end=at_end)
    trainer: Any = FakeTrainer()
    trainer.max_steps = max_steps
    for step in (1, 2, 3):
        callback.save(trainer.at(step))
    callback.on_train_end(trainer, trainer.lightning_module)
    assert trainer.with_context == expected
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step=1", "step=2", "step=3-last"]


@pytest.mark.parametrize(
    ("filename", "values", "name"),
    [
        (None, {"accuracy": 0.25, "step": 20, "consumed_samples": 160}, "llama--accuracy=0.2500-step=20-consumed_samples=160"),
        (None, {"val_loss": 2.5, "step": 20, "consumed_samples": 160}, "llama--step=20-consumed_samples=160"),
        ("{epoch:02d}-{step}", {"epoch": 3, "step": 20}, "epoch=03-step=20"),
        ("{model_name}-{accuracy:.1f}-{step}", {"accuracy": 0.25, "step": 1}, "llama-accuracy=0.2-step=1"),
        ("{a/b}{step}", {"step": 1}, "step=1"),
        ("{val_loss}.{step}", {"step": 1}, "step=1"),
        ("{time/val:.2f}-{step}", {"time/val": 0.25, "step": 1}, "time_val=0.25-step=1"),
    ],
)  # fmt: skip
def test_names_carry_what_they_are_asked_to(filename, values, name):
    callback = ModelCheckpoint(filename=filename, monitor="accuracy")
    callback.model_name = "llama"
    assert callback.format_checkpoint_name(values) == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "mim"}, "log.ckpt.mode='mim'.*min"),
        ({"save_top_k": -2}, "log.ckpt.save_top_k=-2"),
        ({"save_top_k": 1.0}, "log.ckpt.save_top_k=1.0"),
        ({"every_n_train_steps": -1}, "log.ckpt.every_n_train_steps=-1"),
        ({"every_n_train_steps": 1.5}, "log.ckpt.every_n_train_steps=1.5"),
        ({"every_n_epochs": True}, "log.ckpt.every_n_epochs=True"),
        *(({"train_time_interval": one}, "log.ckpt.train_time_interval") for one in (timedelta(0), 60, "00:00:01:00")),
        *(
            ({"filename": name}, "log.ckpt.filename=")
            for name in (
                "last",
                "{val_loss:.2f}",
                "{epoch}",
                "{step",
                "{}-{step}",
                "{step!r}-{step}",
                "{step:.2q}",
                "{step:.1e}",
                ".{step}",
                "{step}\n",
                200 * "x" + "{step}",
            )
        ),
        ({"filename": "{val_loss:d}-{step}"}, "log.ckpt.filename="),  # a metric is a float
        ({"filename": "{epoch}", "every_n_epochs": 1, "every_n_train_steps": 5}, "log.ckpt.filename="),
    ],
)
def test_settings_that_cannot_work_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ModelCheckpoint(**options)


@pytest.mark.parametrize(
    ("given", "place"), [("~/kept", "home/kept"), ("", "root/checkpoints"), (None, "root/checkpoints")]
)
def test_checkpoints_are_saved_where_the_path_says(tmp_path, monkeypatch, given, place):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    callback = keeping(tmp_path, dirpath=given)
    trainer: Any = FakeTrainer()
    trainer.default_root_dir = str(tmp_path / "root")
    callback.setup(trainer, trainer.lightning_module, "fit")
    callback.save(trainer.at(1))
    callback.teardown(trainer, trainer.lightning_module, "fit")
    assert [path.name for path, _ in finished(tmp_path / place)] == ["step=1-last"]


def schedules(directory: str) -> dict[str, list[str]]:
    """Checkpoints of real runs of four steps with two validations, by when they save."""
    found = {}
    for name, options in {
        "steps": {"every_n_train_steps": 3},
        "time": {"train_time_interval": timedelta(microseconds=1)},
        "validation": {},
        "steps and epochs": {"every_n_train_steps": 3, "every_n_epochs": 1},
    }.items():
        folder = Path(directory) / name
        keep = keeping(folder, save_top_k=-1, **options)
        (folder / ".unfinished-0-step=9").mkdir(parents=True)
        small_runs.fit(
            small_runs.build_llama(),
            max_steps=4,
            callbacks=[keep],
            trainer={"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None},
        )
        found[name] = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return found


def validated_and_saved(directory: str) -> dict[str, Any]:
    """Six steps, saved each and validated every second; then the same from the one saved after the second validation. A metric
    is logged every third step."""
    import lightning.pytorch as pl

    from nemo2.checkpoint.directory import finished

    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if trainer.global_step % 3 == 0:
                pl_module.log("score", float(trainer.global_step), logger=False, batch_size=1)

    def run(folder: str, **options: Any) -> dict[str, Any]:
        keep = small_runs.keep(folder, filename="{val_loss:.6f}-{step}", every_n_train_steps=1, save_top_k=-1)
        validate = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}
        settings = validate | {"log_every_n_steps": 4}
        return small_runs.fit(
            small_runs.build_llama(), max_steps=6, callbacks=[Logs(), keep], trainer=settings, **options
        )

    whole = run(f"{directory}/whole")
    saved = finished(Path(directory) / "whole")
    again = run(f"{directory}/again", ckpt_path=str(saved[3][0]))
    return {"whole": whole, "again": again, "saved": [(path.name, manifest.metrics) for path, manifest in saved]}


def test_a_checkpoint_tells_the_losses_of_its_own_step(run_on_ranks, tmp_path):
    runs = run_on_ranks(validated_and_saved, 1, str(tmp_path))[0]
    losses = runs["whole"]["val_losses"]
    assert len(set(losses)) == 3
    assert [name for name, _ in runs["saved"]] == [
        "step=1", f"val_loss={losses[0]:.6f}-step=2", "step=3", f"val_loss={losses[1]:.6f}-step=4", "step=5",
        f"val_loss={losses[2]:.6f}-step=6",
    ]  # fmt: skip
    told = [metrics.get("val_loss") for _, metrics in runs["saved"]]
    assert told == pytest.approx([None, losses[0], None, losses[1], None, losses[2]])
    # Of steps that Lightning doesn't log, too.
    assert [metrics["reduced_train_loss"] for _, metrics in runs["saved"]] == pytest.approx(runs["whole"]["losses"])
    assert [metrics.get("score") for _, metrics in runs["saved"]] == [None, None, 3.0, None, None, 6.0]
    # Saved in the middle of a validation's end: what follows is as it would have been, and nothing is validated twice.
    assert runs["again"]["losses"] == runs["whole"]["losses"][4:]
    assert runs["again"]["samples"] == runs["whole"]["samples"][4:]
    assert runs["again"]["val_losses"] == losses[2:]


def ended_by_the_clock(directory: str) -> list[tuple[int, bool]]:
    """The steps that two runs saved, one after the other, and whether they can be gone on from. Each has three and a half
    seconds, half of the only epoch, by a clock that goes on by one whenever it is looked at."""
    import itertools
    from unittest import mock

    from nemo2.checkpoint.directory import finished

    clock = types.SimpleNamespace(monotonic=itertools.count().__next__)
    path = None
    for _ in range(2):
        keep = keeping(Path(directory), every_n_train_steps=10**6)
        limit = {"max_time": timedelta(seconds=3.5), "max_epochs": 1}
        with mock.patch("lightning.pytorch.callbacks.timer.time", clock):
            small_runs.fit(small_runs.build_llama(), max_steps=10**6, callbacks=[keep], trainer=limit, ckpt_path=path)
        path = finished(Path(directory))[-1][0]
    return [(manifest.step, manifest.weights_only) for _, manifest in finished(Path(directory))]


def test_a_run_whose_time_is_over_saves_all_that_is_needed_and_the_next_has_its_own_time(run_on_ranks, tmp_path):
    saved = run_on_ranks(ended_by_the_clock, 1, str(tmp_path))[0]
    assert saved == [(4, False), (8, False)], "steps, and with the optimizer's state"


def test_saves_follow_steps_time_or_validations(run_on_ranks, tmp_path):
    found = run_on_ranks(schedules, 1, str(tmp_path))[0]
    assert found["steps"] == ["step=3", "step=4-last"]
    assert found["time"] == ["step=1", "step=2", "step=3", "step=4-last"]
    assert found["validation"] == ["step=2", "step=4-last"]
    assert found["steps and epochs"] == ["step=2", "step=3", "step=4-last"]
