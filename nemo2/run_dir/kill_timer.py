# SPDX-License-Identifier: Apache-2.0
"""A kernel timer that ends this process even if a thread holds the interpreter's lock, and that tolerates a stopped
process.

In a process that was stopped (Ctrl-Z, ``scontrol suspend``, a frozen container), all timers have expired when it
continues. This timer ends the process only at the second expiry. The first expiry calls a C handler that does nothing
and is then removed (System V's ``signal``), so a process that continues has time to set the timer again.
"""

import ctypes
import signal

_NUMBER = getattr(signal, "SIGRTMIN", 0) + 8
_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0
SECOND_EXPIRY_SECONDS = 5.0
"""The time between the first expiry, which is ignored, and the second."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("first", _Timespec)]


class _Sigevent(ctypes.Structure):
    """``struct sigevent`` of Linux: 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    ]


class KillTimer:
    """The timer. If the C library has no such timers (macOS, musl), ``available`` is False and nothing else may be
    called."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Sigevent(number=_NUMBER, notify=_SIGEV_SIGNAL)
        calls = ("timer_create", "timer_settime", "timer_delete", "sysv_signal")
        self.available = all(hasattr(self._libc, name) for name in calls)
        if self.available:
            self._libc.sysv_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
            self._libc.sysv_signal.restype = ctypes.c_void_p
            status = self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
            self.available = status == 0

    def set(self, seconds: float) -> None:
        """End this process after ``seconds`` plus `SECOND_EXPIRY_SECONDS`, unless this is called again."""
        self._libc.sysv_signal(_NUMBER, ctypes.cast(self._libc.abs, ctypes.c_void_p))
        self._settime(seconds, SECOND_EXPIRY_SECONDS)

    def end(self) -> None:
        """Cancel the timer."""
        self._settime(0.0, 0.0)
        self._libc.timer_delete(self._timer)

    def _settime(self, first: float, interval: float) -> None:
        spec = _Itimerspec(_timespec(interval), _timespec(first))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)


def _timespec(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))
