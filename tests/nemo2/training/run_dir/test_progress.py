# SPDX-License-Identifier: Apache-2.0
"""Progress lines: NeMo's form, on logged steps of rank 0 only, and readable by the launcher."""

import io
import math
import re

import pytest
import torch
from rich.console import Console

from nemo2.training.run_dir.bar import TrainingBar, summary
from nemo2.training.run_dir.progress import MegatronProgressBar, ProgressPrinter, make_progress, total_steps
from nemo2.training.run_dir.progress_line import format_line, parse_line
from support.one_weight import OneWeight, quiet_trainer

# The form that scripts for NeMo 2.0 look for.
NEMO_LINE = re.compile(
    r"^Training epoch 0, iteration (\d+)/(\d+) \| lr: [\d.e-]+ \| global_batch_size: \d+ \| global_step: \d+ "
    r"\| reduced_train_loss: [\d.]+ \| train_step_timing in s: [\d.]+"
)


class Model(OneWeight):
    def training_step(self, batch, batch_index):
        self.log_dict(
            {
                "lr": 5.988e-07,
                "global_batch_size": 256.0,
                "global_step": float(self.trainer.global_step),
                "reduced_train_loss": 12.33 - self.trainer.global_step,
                "train_step_timing in s": 0.25,
            }
        )
        return super().training_step(batch, batch_index)

    def validation_step(self, batch, batch_index):
        self.log("val_loss", 3.5)


def fit(progress, tmp_path, *, validate=False, **settings):
    data = torch.utils.data.DataLoader(torch.zeros(20, 1))
    options = {"max_steps": 6, "default_root_dir": tmp_path, "num_sanity_val_steps": 0, "enable_progress_bar": True}
    trainer = quiet_trainer(callbacks=[progress], **options | settings)
    trainer.fit(Model(), data, data if validate else None)
    return trainer


def lines_of(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if parse_line(line)]


def test_each_logged_step_is_one_line_in_nemos_form_and_the_listener_leaves_with_the_run(tmp_path, capsys):
    assert fit(ProgressPrinter(), tmp_path).loggers == []
    lines = lines_of(capsys)
    assert [tuple(map(int, NEMO_LINE.match(line).groups())) for line in lines] == [(number, 5) for number in range(6)]
    # The values are those of the very step, not of the one before.
    assert "global_step: 3 | reduced_train_loss: 9.33" in lines[3]
    fit(ProgressPrinter(), tmp_path, log_every_n_steps=3)
    assert [parse_line(line).step for line in lines_of(capsys)] == [2, 5]


def test_values_are_averaged_over_the_interval_and_counters_are_not(tmp_path, capsys):
    fit(ProgressPrinter(log_interval=2), tmp_path)
    first, second, third = map(parse_line, lines_of(capsys))
    assert first.step == 1 and first.metrics["global_step"] == 1
    assert first.metrics["reduced_train_loss"] == pytest.approx((12.33 + 11.33) / 2, abs=0.01)
    assert third.metrics["reduced_train_loss"] == pytest.approx((8.33 + 7.33) / 2, abs=0.01)
    assert second.metrics["lr"] == pytest.approx(5.988e-07)


def test_a_validation_is_its_own_line_at_the_step_it_followed(tmp_path, capsys):
    fit(ProgressPrinter(), tmp_path, validate=True, val_check_interval=3, limit_val_batches=2)
    validations = [line for line in map(parse_line, lines_of(capsys)) if line.stage == "Validation"]
    assert [(line.step, line.metrics["val_loss"]) for line in validations] == [(2, 3.5), (5, 3.5)]


def test_excluded_metrics_are_not_printed_and_an_interval_of_zero_prints_nothing(tmp_path, capsys):
    fit(ProgressPrinter(exclude_metrics=["lr"]), tmp_path)
    assert all("lr:" not in line for line in lines_of(capsys))
    fit(ProgressPrinter(log_interval=0), tmp_path)
    assert lines_of(capsys) == []


def test_other_ranks_print_nothing(tmp_path, capsys):
    progress = ProgressPrinter()

    class Rank1:
        is_global_zero = False
        loggers = ()

    progress.setup(Rank1(), None, "fit")
    progress.on_logged({"reduced_train_loss": 1.0}, step=0)
    assert progress.is_disabled and capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e-9, 123456.0, 2.5])
def test_a_line_is_read_back_as_it_was_written(value):
    line = format_line("Training", epoch=2, step=7, last_step=None, metrics={"a b in s": value, "lr": 0.1})
    parsed = parse_line(line)
    assert (parsed.stage, parsed.epoch, parsed.step, parsed.last_step) == ("Training", 2, 7, None)
    assert parsed.metrics == pytest.approx({"a b in s": value, "lr": 0.1}, rel=0, abs=0, nan_ok=True)
    for text in ("", "Training", "Training epoch 0", "hello: 3", "Traceback (most recent call last):"):
        assert parse_line(text) is None


def test_a_terminal_gets_a_bar_and_everything_else_gets_lines(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress(stream=Terminal()), MegatronProgressBar)
    assert isinstance(make_progress(stream=io.StringIO()), ProgressPrinter)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(stream=Terminal()), ProgressPrinter)


def test_the_bar_shows_steps_loss_and_speed(tmp_path):
    screen = io.StringIO()
    bar = TrainingBar(console=Console(file=screen, force_terminal=True, width=160))
    progress = MegatronProgressBar()
    progress._bar = bar
    fit(progress, tmp_path, validate=True, val_check_interval=3)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "6/6" in shown and "loss 7.33" in shown and "val 3.5" in shown and "0.25 s/step" in shown
    assert not bar.is_shown


def test_the_summary_prefers_tokens_per_second():
    parts = summary(
        {"reduced_train_loss": 2.4134, "tokens_per_second": 12_400, "train_step_timing in s": 1, "lr": 3e-4}
    )
    assert list(parts.values()) == ["loss 2.413", "lr 3.0e-04", "12.4k tok/s"]


@pytest.mark.parametrize(
    ("width", "there", "gone"),
    [
        (
            110,
            ["training", "━", "150/300", "loss 7.645", "val 7.487", "lr 3.1e-04", "421 tok/s", "0:00:0", "eta -:--:--"],
            [],
        ),
        (80, ["training", "━", "150/300", "loss 7.645", "val 7.487", "421 tok/s", "eta -:--:--"], ["lr "]),
        (60, ["150/300", "loss 7.645", "val 7.487", "421 tok/s", "eta -:--:--"], ["lr ", "━"]),
        (40, ["150/300", "loss 7.645", "val 7.487"], ["training", "━", "tok/s"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_parts_and_each_of_them_whole(width, there, gone):
    screen = io.StringIO()
    bar = TrainingBar(console=Console(file=screen, force_terminal=True, width=width, color_system=None))
    bar.start(total=300)
    metrics = {"reduced_train_loss": 7.6451, "val_loss": 7.4871, "lr": 3.1e-4, "tokens_per_second": 421.0}
    bar.update(completed=150, metrics=metrics)
    bar.stop()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").strip().splitlines()[-1]
    assert len(shown) <= width and "…" not in shown
    assert all(part in shown for part in there) and not any(part in shown for part in gone)


def test_the_end_of_a_run_by_epochs_is_known_and_of_an_endless_run_is_not():
    class Run:
        estimated_stepping_batches = math.inf

    assert total_steps(Run()) is None
    Run.estimated_stepping_batches = 40
    assert total_steps(Run()) == 40
