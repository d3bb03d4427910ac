# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for CUDA streams, events and contexts on a device that works in order, as a CPU does.

On a CPU an operation has finished when it returns, so waiting for a stream or an event is already done. Events keep the
wall clock, because timing code reads `elapsed_time`.
"""

import time
from typing import Any, Self


class NullContext:
    """Stands in for `torch.cuda.stream(...)`, `torch.cuda.device(...)` and `nvtx.range(...)`. Accepts any arguments and
    has no effect."""

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        del exc_info


class NullEvent:
    """A moment that has always passed. `elapsed_time` is in milliseconds, as torch's."""

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs
        self._seconds: float | None = None

    def record(self, stream: object = None) -> None:
        del stream
        self._seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        del stream

    def synchronize(self) -> None:
        """The work is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "NullEvent") -> float:
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("Record both events before you ask for the time between them.")
        return (end._seconds - self._seconds) * 1e3


class NullStream(NullContext):
    """A queue that is always empty. All of them compare equal: there is one order of work on a CPU."""

    cuda_stream = 0
    device_index = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: object) -> None:
        del stream

    def wait_event(self, event: object) -> None:
        del event

    def synchronize(self) -> None:
        """The work is done."""

    def query(self) -> bool:
        return True

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        event = event or NullEvent()
        event.record(self)
        return event
