# SPDX-License-Identifier: Apache-2.0
"""The profiler callback writes a trace per rank that `nemo2 runs trace` can read, of the steps it was asked for."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.callbacks import PytorchProfilerCallback
from nemo2.config.capture import captured_arguments
from nemo2.report.trace.report import render, traces_of
from support import small_runs

CONTEXT = ("p2p", "all_gather", "a2a")


def profile_a_run(folder: str) -> dict[str, Any]:
    callback = PytorchProfilerCallback(start_step=1, end_step=4, active_steps=2, trace_dir=folder)
    plain = small_runs.fit(small_runs.build_llama(), max_steps=4)
    small_runs.release()
    profiled = small_runs.fit(small_runs.build_llama(), max_steps=4, callbacks=[callback])
    small_runs.release()
    losses = {"plain": plain["losses"], "profiled": profiled["losses"]}
    for kind in CONTEXT:
        callback = PytorchProfilerCallback(start_step=1, end_step=2, trace_dir=f"{folder}/{kind}")
        model = small_runs.build_llama(cp_comm_type=kind)
        record = small_runs.fit(model, max_steps=2, callbacks=[callback], context_parallel_size=2)
        small_runs.release()
        losses[kind] = record["losses"]
    return losses


@pytest.fixture(scope="module")
def profiled(run_on_ranks, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_on_ranks(profile_a_run, 2, str(folder))


def test_profiling_does_not_change_the_losses(profiled):
    for answer in profiled[1]:
        assert answer["profiled"] == answer["plain"]


def test_each_rank_has_a_trace_with_two_steps_of_computation_and_gradient_reductions(profiled):
    folder, _ = profiled
    traces = traces_of(folder)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        (dp,) = [one for one in trace.hidden() if one.kind == "dp"]
        assert dp.count >= 2 and dp.total > 0 and 0 <= dp.fraction <= 1 and dp.size_bytes > 0
        # On the profiler's clock, not beside it.
        assert trace.busy and trace.busy[0][0] - 1e6 < trace.of("dp")[0].start < trace.busy[-1][1] + 1e6
        assert "data parallel" in render(traces, title="t")
    events = json.loads((folder / "rank-0.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert len(steps) >= 2


@pytest.mark.parametrize("kind", CONTEXT)
def test_context_parallel_messages_are_told_from_others_with_their_hidden_share(profiled, command, kind):
    folder, answers = profiled
    traces = traces_of(folder / kind)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        hidden = {one.kind: one for one in trace.hidden()}
        assert hidden["cp"].count > 0 and hidden["cp"].total > 0 and hidden["cp"].size_bytes > 0
        # The ring sends keys on before it attends to them; the other two wait for what they gather or exchange.
        assert hidden["cp"].hidden > 0 if kind == "p2p" else hidden["cp"].hidden == 0
    for answer in answers:
        assert answer[kind] == pytest.approx(answer["plain"][:2], rel=1e-6), "the same batches and the same numbers"
    assert re.search(r"^ +1  context parallel +\d", command("runs trace", folder / kind).out, re.MULTILINE)
    assert "context parallel" in (folder / kind / "overlap.html").read_text()


def test_making_one_touches_no_file_and_keeps_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = PytorchProfilerCallback(start_step=1, end_step=3, profiler_kwargs={"with_stack": True})
    assert list(tmp_path.iterdir()) == []
    assert captured_arguments(callback)["profiler_kwargs"] == {"with_stack": True}


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    callback = PytorchProfilerCallback(start_step=0, end_step=2, trace_dir=tmp_path / "file" / "traces")
    with pytest.raises(ConfigError, match="PytorchProfilerCallback.trace_dir"):
        callback.on_train_start(SimpleNamespace(callbacks=[]), None)  # pyright: ignore[reportArgumentType]


def test_steps_that_a_run_never_reaches_are_reported(tmp_path, caplog):
    trainer: Any = SimpleNamespace(callbacks=[], is_global_zero=True, global_step=4)
    callback = PytorchProfilerCallback(start_step=10, end_step=12, trace_dir=tmp_path)
    callback.on_train_start(trainer, trainer)
    callback.on_train_end(trainer, trainer)
    assert "recorded nothing" in caplog.text and "start_step=10" in caplog.text


def test_a_run_that_ends_in_the_warm_up_writes_no_trace_and_says_so(tmp_path, caplog):
    trainer: Any = SimpleNamespace(callbacks=[], is_global_zero=True, global_rank=0, global_step=1)
    callback = PytorchProfilerCallback(start_step=1, end_step=12, warmup_steps=5, trace_dir=tmp_path)
    callback.on_train_start(trainer, trainer)
    callback.on_train_batch_start(trainer)
    trainer.global_step = 2
    callback.on_train_batch_end(trainer)
    callback.on_train_end(trainer, trainer)
    assert "recorded nothing" in caplog.text and "warmup_steps=5" in caplog.text and not list(tmp_path.iterdir())


def test_a_resumed_run_keeps_the_trace_of_its_first_start_and_does_not_miss_it(tmp_path, caplog):
    def start(first: int) -> None:
        trainer: Any = SimpleNamespace(callbacks=[], is_global_zero=True, global_rank=0, global_step=first)
        callback = PytorchProfilerCallback(start_step=1, end_step=3, trace_dir=tmp_path)
        callback.on_train_start(trainer, trainer)
        for step in range(first, 4):
            callback.on_train_batch_start(trainer)
            trainer.global_step = step + 1
            callback.on_train_batch_end(trainer)
        callback.on_train_end(trainer, trainer)

    start(0)
    first = (tmp_path / "rank-0.json").read_bytes()
    start(3)
    assert not caplog.text and (tmp_path / "rank-0.json").read_bytes() == first
    start(2)
    assert (tmp_path / "rank-0.1.json").read_bytes() == first and "is now rank-0.1.json" in caplog.text
    assert [trace.rank for trace in traces_of(tmp_path)] == [0]


def test_a_trace_that_cannot_be_written_is_a_warning_and_no_older_trace_passes_for_it(tmp_path, caplog):
    trainer: Any = SimpleNamespace(callbacks=[], is_global_zero=True, global_rank=0, global_step=1)
    (tmp_path / "rank-0.json").write_text('{"traceEvents": []}')
    (tmp_path / "rank-0.json.tmp").mkdir()  # where torch's profiler writes
    callback = PytorchProfilerCallback(start_step=1, end_step=2, trace_dir=tmp_path)
    callback.on_train_batch_start(trainer)
    trainer.global_step = 2
    callback.on_train_batch_end(trainer)
    assert "rank-0.json was not written" in caplog.text and not (tmp_path / "rank-0.json").exists()
