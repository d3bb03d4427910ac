# SPDX-License-Identifier: Apache-2.0
"""Hidden fractions by hand-made spans, and traces of torch's profiler from a GPU and a CPU."""

import gzip
import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from nemo2.base.errors import DataError
from nemo2.report.trace.chrome import add_communication, read_trace
from nemo2.report.trace.events import COMPUTE, RankTrace, Span, difference, intersection, length, union
from nemo2.report.trace.report import draw, render, rows


def kernel(name: str, ts: float, dur: float, **arguments: object) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": arguments}


# Names and arguments as torch 2.5 and later write them (ParamCommsUtils); times made up so that the shares are round.
GPU = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 900},
        kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 100, 100),
        kernel("void at::native::vectorized_elementwise_kernel<4>", 250, 50),
        kernel(
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            150,
            100,
            **{
                "Collective name": "_reduce_scatter_base",
                "In msg nelems": 4000,
                "Out msg nelems": 500,
                "Group size": 8,
                "dtype": "Float",
                "Process Group Name": "7",
                "Process Group Description": "DATA_PARALLEL_GROUP_WITH_CP",
            },
        ),
        kernel(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            260,
            40,
            **{
                "Collective name": "_allgather_base",
                "In msg nelems": 100,
                "Out msg nelems": 200,
                "dtype": "BFloat16",
                "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
            },
        ),
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 400, 10),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 9, "ts": 500, "dur": 10, "args": {}},
    ],
}


def test_times_are_united_cut_and_subtracted():
    assert union([(5, 9), (0, 2), (1, 3), (4, 4), (6, 7)]) == [(0, 3), (5, 9)]
    assert intersection([(0, 3), (5, 9)], [(2, 6), (8, 10)]) == [(2, 3), (5, 6), (8, 9)]
    assert difference([(0, 10)], [(2, 3), (3, 4), (5, 6)]) == [(0, 2), (4, 5), (6, 10)]
    assert difference([(0, 1), (2, 5)], [(-1, 3), (9, 10)]) == [(3, 5)] and difference([(0, 1)], []) == [(0, 1)]
    assert length([(0, 3), (5, 6)]) == 4


def test_communication_is_hidden_as_far_as_the_rank_computes_and_overlaps_count_once():
    trace = RankTrace(
        0,
        [
            Span(kind=COMPUTE, name="a", start=0, end=60),
            Span(kind=COMPUTE, name="b", start=50, end=80),
            Span(kind="dp", name="reduce", start=40, end=120, size_bytes=10),
            Span(kind="dp", name="reduce", start=60, end=140, size_bytes=20),
            Span(kind="pp", name="send", start=200, end=210),
        ],
    )
    dp, pp = trace.hidden()
    assert (dp.kind, dp.count, dp.total, dp.hidden, dp.size_bytes) == ("dp", 2, 100, 40, 30)
    assert dp.fraction == pytest.approx(0.4) and pp.fraction == 0


def test_a_gpu_trace_is_read_by_kernels_and_the_groups_they_name(tmp_path):
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(GPU, file)
    trace = read_trace(path)
    assert trace.rank == 3
    found = {one.kind: one for one in trace.hidden()}
    assert set(found) == {"dp", "tp", "other"}
    # Under way from 150 to 250, of which the product runs until 200.
    assert (found["dp"].total, found["dp"].hidden, found["dp"].size_bytes) == (100, 50, 16_000)
    assert (found["tp"].total, found["tp"].hidden, found["tp"].size_bytes) == (40, 40, 400)
    assert found["other"].hidden == 0
    assert length(trace.busy) == 150, "operators on the host and copies are not computation"


def test_a_cpu_trace_takes_what_was_recorded_and_not_what_runs_inside_a_collective(tmp_path):
    path = tmp_path / "rank-0.json"
    base = 1_700_000_000_000_000_000
    operator = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    events = [
        operator | {"name": "aten::mm", "ts": 1000.0, "dur": 100.0},
        operator | {"name": "aten::copy_", "ts": 1110.0, "dur": 5.0},
        operator | {"name": "c10d::allreduce_", "ts": 1105.0, "dur": 500.0},
        operator | {"name": "aten::chunk", "ts": 1210.0, "dur": 5.0},
        operator | {"name": "gloo:all_reduce", "ts": 1130.0, "dur": 100.0, "tid": 9, "cat": "user_annotation"},
        operator | {"name": "aten::copy_", "ts": 1140.0, "dur": 20.0, "tid": 9},
    ]
    path.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    communication = SimpleNamespace(
        name="allreduce",
        kind="dp",
        group="DATA_PARALLEL_GROUP",
        size_bytes=64,
        issued=base + 1_050_000,
        returned=base + 1_120_000,
        waits=[(base + 1_200_000, base + 1_250_000)],
        done=base + 1_250_000,
    )
    add_communication(path, [communication, SimpleNamespace(done=None)])
    (dp,) = read_trace(path).hidden()
    assert (dp.total, dp.count, dp.size_bytes) == (200, 1, 64)
    # The product is cut where the rank went into the call; the copies inside it, in waiting and on gloo's thread
    # don't count.
    assert dp.hidden == 0 and length(read_trace(path).busy) == 50


@pytest.mark.parametrize("content", ["{", "[]", '{"traceEvents": 3}', "\x00"])
def test_a_file_that_is_no_trace_is_named(tmp_path, content):
    path = tmp_path / "rank-0.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"rank-0\.json: not a trace of torch's profiler"):
        read_trace(path)


def test_the_command_draws_every_rank_and_prints_the_shares(tmp_path, command):
    folder = tmp_path / "run" / "traces"
    folder.mkdir(parents=True)
    for rank in (0, 10, 2):
        (folder / f"rank-{rank}.json").write_text(json.dumps(GPU))
    (folder / "rank-of-another-tool.json").write_text("{}")
    printed = command("runs trace", tmp_path / "run").out
    assert [line.split()[0] for line in printed.splitlines()[1:-1]] == [r for r in ("0", "2", "10") for _ in range(3)]
    assert "50.0%" in printed and printed.rstrip().endswith("overlap.html")
    page = (folder / "overlap.html").read_text()
    assert "rank 10: data parallel 50% hidden, tensor parallel 100% hidden" in page and "<script" not in page
    assert {row["rank"] for row in command("runs trace", folder, "--json").json} == {0, 2, 10}


def test_lanes_are_drawn_to_scale(tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(GPU | {"traceEvents": [*GPU["traceEvents"], None]}))  # an event of no kind is skipped
    trace = read_trace(path)
    root = ElementTree.fromstring(draw(trace).render())
    spans = {
        (one.find("{http://www.w3.org/2000/svg}title").text or "").split(":")[0]: one.attrib  # pyright: ignore
        for one in root.iter("{http://www.w3.org/2000/svg}rect")
        if len(one)
    }
    product = next(value for name, value in spans.items() if name.startswith("sm90"))
    reduce = spans["_reduce_scatter_base"]
    assert float(product["width"]) == pytest.approx(float(reduce["width"]), abs=0.2)
    assert float(reduce["x"]) - float(product["x"]) == pytest.approx(float(product["width"]) / 2, abs=0.2)


def test_a_rank_without_communication_says_so():
    trace = RankTrace(0, [Span(kind=COMPUTE, name="a", start=0, end=10)])
    assert rows([trace]) == [] and "No communication was recorded" in render([trace], title="t")


def test_no_traces_are_answered_with_how_to_make_them(tmp_path, command):
    assert "PytorchProfilerCallback(start_step=5, end_step=7)" in command("runs trace", tmp_path, code=2).err
