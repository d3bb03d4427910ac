# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for streams and events keep the promises that callers rely on."""

import time

import pytest

from nemo2.base.backend.null_cuda import NullContext, NullEvent, NullStream


def test_events_measure_the_wall_clock_in_milliseconds():
    start, end = NullEvent(enable_timing=True), NullEvent(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record(NullStream())
    end.synchronize()
    assert end.query() and 15 < start.elapsed_time(end) < 20_000


def test_an_unrecorded_event_has_no_distance():
    with pytest.raises(RuntimeError, match="Record both events"):
        NullEvent().elapsed_time(NullEvent())


def test_there_is_one_order_of_work():
    a, b = NullStream(priority=-1), NullStream()
    assert a == b and hash(a) == hash(b) and a != "stream"
    a.wait_stream(b)
    a.wait_event(b.record_event())
    with a, NullContext(a):
        assert a.query()
