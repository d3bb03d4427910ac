# SPDX-License-Identifier: Apache-2.0
"""The profiler callback writes a trace per rank that `nemo2 trace` can read, of the steps it was asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_runs

from nemo2.callbacks import PytorchProfilerCallback
from nemo2.config.capture import captured_arguments
from nemo2.errors import ConfigError
from nemo2.trace.report import render, traces_of


def profile_a_run(folder: str) -> dict[str, Any]:
    callback = PytorchProfilerCallback(start_step=1, end_step=4, active_steps=2, trace_dir=folder)
    plain = small_runs.fit(small_runs.build_llama(), max_steps=4)
    small_runs.release()
    profiled = small_runs.fit(small_runs.build_llama(), max_steps=4, callbacks=[callback])
    small_runs.release()
    return {"plain": plain["losses"], "profiled": profiled["losses"]}


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_step": 3, "end_step": 3}, "end_step=3 leaves no step to keep .* use at least 4"),
        ({"start_step": 1, "end_step": 3, "warmup_steps": 2}, "use at least 4"),
        ({"start_step": -1, "end_step": 2}, "start_step=-1: must be a whole number of at least 0"),
        ({"start_step": 1.5, "end_step": 2}, "start_step=1.5"),
        ({"start_step": 0, "end_step": 2, "active_steps": 0}, "active_steps=0"),
    ],
)
def test_steps_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PytorchProfilerCallback(**arguments)


def test_making_one_touches_no_file_and_keeps_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = PytorchProfilerCallback(start_step=1, end_step=3, profiler_kwargs={"with_stack": True})
    assert list(tmp_path.iterdir()) == []
    assert captured_arguments(callback)["profiler_kwargs"] == {"with_stack": True}
