# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl``: valid JSON whatever the loss does, and one curve however often a run was resumed."""

import errno
import json
import math
import os
import shutil

import pytest
import torch

from nemo2.base.errors import DataError, RuntimeFault
from nemo2.training.run_dir.metrics import JSONLLogger
from nemo2.training.run_dir.records import (
    RESUMED_FILE,
    SET_ASIDE_FILE,
    read_metrics,
    resumptions,
    series,
    truncate_metrics,
)


def test_a_line_is_on_disk_as_soon_as_it_is_logged_and_has_the_documented_names(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics(
        {"reduced_train_loss": 2.5, "train_step_timing in s": 0.25, "consumed_samples": 64.0, "v_num": 3.0}, step=7
    )
    # Read without closing: a run that is killed now has left its last step.
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 7,
        "reduced_train_loss": 2.5,
        "train_step_timing": 0.25,
        "consumed_samples": 64,
    }
    logger.finalize("success")


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics({"reduced_train_loss": math.nan, "grad_norm": math.inf, "lr": 0.1}, step=0)
    logger.finalize("success")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["reduced_train_loss"] is None and line["nonfinite"] == {"reduced_train_loss": "nan", "grad_norm": "inf"}
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["reduced_train_loss"]) and record["grad_norm"] == math.inf and record["lr"] == 0.1


def test_counters_are_exact_where_float32_is_not(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    samples = 2**24 + 1
    logger.counters = lambda: {"consumed_samples": samples}
    logger.log_metrics({"consumed_samples": float(torch.tensor(samples, dtype=torch.float32))}, step=0)
    logger.log_metrics({"val_loss": 1.0}, step=0)
    logger.finalize("success")
    train, validation = read_metrics(tmp_path)
    assert train["consumed_samples"] == samples and "consumed_samples" not in validation


def test_the_step_is_the_number_of_the_step_whatever_the_axis_of_other_loggers_counts(tmp_path):
    logger = JSONLLogger(str(tmp_path))
    logger.log_metrics({"reduced_train_loss": 1.0, "global_step": 4.0}, step=5)
    logger.log_metrics({"val_loss": 1.0, "epoch": 0}, step=4)
    logger.finalize("success")
    assert [record["step"] for record in read_metrics(tmp_path)] == [4, 4]
    assert all("global_step" not in record for record in read_metrics(tmp_path))


def test_a_resumed_run_continues_the_curve_without_the_steps_that_are_done_again(tmp_path):
    first = JSONLLogger(str(tmp_path))
    for step in range(10):
        first.log_metrics({"reduced_train_loss": float(step)}, step=step)
    first.log_metrics({"val_loss": 0.5}, step=5)
    first.finalize("failed")
    second = JSONLLogger(str(tmp_path))
    second.resume_at(6)  # the checkpoint was written after six steps, numbers 0 to 5
    for step in range(6, 8):
        second.log_metrics({"reduced_train_loss": 100.0 + step}, step=step)
    second.finalize("success")
    losses = series(read_metrics(tmp_path), "reduced_train_loss")
    assert losses == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 106.0), (7, 107.0)]
    assert series(read_metrics(tmp_path), "val_loss") == [(5, 0.5)]
    redone = [json.loads(line)["step"] for line in (tmp_path / SET_ASIDE_FILE).read_text().splitlines()]
    assert redone == [6, 7, 8, 9]
    third = JSONLLogger(str(tmp_path))
    third.resume_at(8)
    assert [str(one) for one in resumptions(tmp_path)] == [
        "stopped at step 10, resumed at 6",
        "stopped and resumed at step 8",
    ]


def test_a_run_that_begins_anew_was_not_resumed_and_a_damaged_record_of_it_stops_nothing(tmp_path):
    log = JSONLLogger(str(tmp_path))
    log.resume_at(0)
    log.log_metrics({"lr": 1.0}, step=0)
    log.resume_at(0)
    assert resumptions(tmp_path) == [] and not (tmp_path / RESUMED_FILE).exists()
    for text in ('{"step": 3}\n', '{"step": "x", "stopped_at": 4}\n', "[]\n{}\n"):
        (tmp_path / RESUMED_FILE).write_text(text)
        assert resumptions(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n[]\n{"step": 2}\n')
    log.resume_at(1)


def test_a_torn_last_line_is_left_out_and_removed_on_resume(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "lr": 1.0}\n{"step": 1, "l')
    assert [record["step"] for record in read_metrics(file)] == [0]
    assert truncate_metrics(file, finished_steps=1) == 0
    assert file.read_text() == '{"step": 0, "lr": 1.0}\n'


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n[]\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not a JSON object"):
        read_metrics(tmp_path)


def test_a_run_without_metrics_is_an_error_that_says_when_they_appear(tmp_path):
    with pytest.raises(DataError, match="first logged step"):
        read_metrics(tmp_path)


class _Refusing:
    """A file on a disk that refuses each line."""

    def __init__(self, file, number):
        self.file, self.number = file, number

    def write(self, *_):
        raise OSError(self.number, os.strerror(self.number))

    flush = write

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_lines_that_a_full_disk_refuses_end_the_run_with_the_files_name(tmp_path):
    log = JSONLLogger(str(tmp_path))
    log.log_metrics({"loss": 1.0}, step=0)
    log._file = _Refusing(log._file, errno.ENOSPC)
    with pytest.raises(RuntimeFault, match=r"metrics\.jsonl can't be written \(No space left on device\)"):
        log.log_metrics({"loss": 2.0}, step=1)


@pytest.mark.parametrize("remove", ["the file", "the folder"])
def test_a_file_that_is_removed_while_the_run_writes_begins_anew_and_says_so(tmp_path, caplog, remove):
    folder = tmp_path / "run"
    log = JSONLLogger(str(folder))
    log.log_metrics({"loss": 1.0}, step=0)
    log.path.unlink() if remove == "the file" else shutil.rmtree(folder)
    log.log_metrics({"loss": 2.0}, step=1)
    log.log_metrics({"loss": 3.0}, step=2)
    assert [record["step"] for record in read_metrics(folder)] == [1, 2]
    assert sum("was removed during the run" in told.message for told in caplog.records) == 1
