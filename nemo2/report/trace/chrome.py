# SPDX-License-Identifier: Apache-2.0
"""Reads a trace of torch's profiler (`export_chrome_trace`) into spans, and adds recorded communication to a trace.

On a GPU, NCCL's kernels are communication and all other kernels are computation. The arguments of NCCL's kernels
contain the group's description, the collective's name and its sizes (torch/csrc/distributed/c10d/ParamCommsUtils.hpp).

On a CPU, operators are computation. Communication is recorded by `CommunicationRecorder`, and `add_communication`
writes it into the trace under a separate category.
"""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo2.base.errors import DataError
from nemo2.report.trace.events import COMPUTE, Interval, RankTrace, Span, difference, kernel_kind, union

CATEGORY = "nemo2_communication"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_DTYPES = {
    1: ("byte", "char", "bool", "float8_e4m3fn", "float8_e5m2"),
    2: ("short", "half", "bfloat16"),
    4: ("int", "float"),
    8: ("long", "double"),
}
_DTYPE_BYTES = {name: size for size, names in _DTYPES.items() for name in names}


def read_trace(path: Path, *, rank: int | None = None) -> RankTrace:
    """The spans of a trace file, plain or gzipped.

    Args:
        path: A file that `export_chrome_trace` wrote.
        rank: The rank of the trace. None: the rank in the file (``distributedInfo``), else 0.

    Raises:
        DataError: the file isn't a trace of torch's profiler.
    """
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
        events = content["traceEvents"] if isinstance(content, dict) else None
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(
            f"{path}: not a trace of torch's profiler ({type(error).__name__}: {error}). The file may be incomplete: "
            "PytorchProfilerCallback writes it at the end of the last profiled step."
        ) from error
    if not isinstance(events, list):
        raise DataError(f"{path}: not a trace of torch's profiler, because it has no list of traceEvents.")
    if rank is None:
        rank = int((content.get("distributedInfo") or {}).get("rank", 0))
    complete = [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event]
    on_gpu = any(event.get("cat") == "kernel" for event in complete)
    return RankTrace(rank, list(_gpu_spans(complete) if on_gpu else _cpu_spans(complete)))


def add_communication(path: Path, communications: Iterable[Any]) -> None:
    """Add the communication that a `CommunicationRecorder` recorded to a trace file, in the trace's clock."""
    content = json.loads(path.read_text(encoding="utf-8"))
    base = int(content.get("baseTimeNanoseconds", 0))
    for communication in communications:
        if communication.done is None:
            continue
        content["traceEvents"].append(
            {
                "ph": "X",
                "cat": CATEGORY,
                "name": communication.name,
                "pid": "communication",
                "tid": communication.kind,
                "ts": (communication.issued - base) / 1000,
                "dur": (communication.done - communication.issued) / 1000,
                "args": {
                    "Process Group Description": communication.group,
                    "bytes": communication.size_bytes,
                    "held": [
                        [(start - base) / 1000, (end - base) / 1000]
                        for start, end in ((communication.issued, communication.returned), *communication.waits)
                    ],
                },
            }
        )
    path.write_text(json.dumps(content), encoding="utf-8")


def _gpu_spans(events: list[dict[str, Any]]) -> Iterable[Span]:
    for event in events:
        if event.get("cat") not in _KERNELS:
            continue
        start, arguments = float(event["ts"]), event.get("args") or {}
        end = start + float(event["dur"])
        if "nccl" in str(event["name"]).lower():
            # Before torch 2.3 kernels have a name but no description of the group.
            description = str(arguments.get("Process Group Description") or "")
            name = str(arguments.get("Collective name") or event["name"])
            elements = max(int(arguments.get("In msg nelems") or 0), int(arguments.get("Out msg nelems") or 0))
            yield Span(
                kind=kernel_kind(name, description),
                name=name,
                start=start,
                end=end,
                size_bytes=elements * _DTYPE_BYTES.get(str(arguments.get("dtype", "")).lower(), 0),
            )
        elif event["cat"] == "kernel":
            # Copies are neither computation nor communication: a copy engine runs them beside both.
            yield Span(kind=COMPUTE, name=str(event["name"]), start=start, end=end)


def _cpu_spans(events: list[dict[str, Any]]) -> Iterable[Span]:
    held: list[Interval] = []
    # The operators of gloo's own threads, which split and copy messages, are communication. If gloo works in the
    # caller's thread, the recorder marks the caller as held.
    senders = {(event.get("pid"), event.get("tid")) for event in events if str(event["name"]).startswith("gloo:")}
    senders -= {(event.get("pid"), event.get("tid")) for event in events if str(event["name"]).startswith("c10d::")}
    for event in events:
        if event.get("cat") != CATEGORY:
            continue
        start, arguments = float(event["ts"]), event.get("args") or {}
        held += [(float(begin), float(end)) for begin, end in arguments.get("held", ())]
        yield Span(
            kind=kernel_kind(str(event["name"]), str(arguments.get("Process Group Description", ""))),
            name=str(event["name"]),
            start=start,
            end=start + float(event["dur"]),
            size_bytes=int(arguments.get("bytes", 0)),
        )
    operators = (
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") == "cpu_op"
        and str(event["name"]).startswith("aten::")
        and (event.get("pid"), event.get("tid")) not in senders
    )
    # Operators inside a call of torch.distributed, or inside the wait for such a call, are communication.
    for start, end in difference(union(operators), union(held)):
        yield Span(kind=COMPUTE, name="operators", start=start, end=end)
