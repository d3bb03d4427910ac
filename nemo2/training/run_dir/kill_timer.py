# SPDX-License-Identifier: Apache-2.0
"""A kernel timer that ends this process even if a thread holds the interpreter's lock, and that tolerates a stopped
process.

In a process that was stopped (Ctrl-Z, ``scontrol suspend``, a frozen container), all timers have expired when it
continues. It must then have time to set them again, counted from when it continues. So there are two timers, and both
signal one thread that only waits. The handler of the first signal is C's ``sleep``: its argument is the signal's number,
and it blocks the second signal while it sleeps. The second signal writes the stacks and ends the process. By then the
lock has been held for all that time, so no frame changes while it is read. Python's ``dump_traceback_later`` reads them
at its timeout, while other threads may run, and crashes then (CPython issues 116008 and 140815).
"""

import ctypes
import faulthandler
import math
import signal
import threading
import time
from typing import IO

_GRACE_NUMBER = getattr(signal, "SIGRTMIN", 0) + 8
GRACE_SECONDS = _GRACE_NUMBER
"""The time between the expiry and the end: the number of the signal."""
_END_NUMBER = _GRACE_NUMBER + 1
"""Of two pending signals, the kernel delivers the lower number first."""
_BETWEEN_SECONDS = 1.0
_GRACE_CALL = "sleep"
_CLOCK_MONOTONIC = 1
_SIGEV_THREAD_ID = 4
_SIG_IGN = 1


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
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    ]


class _Sigaction(ctypes.Structure):
    """``struct sigaction`` of glibc."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("blocked", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class KillTimer:
    """Ends this process, with the stacks of its threads in ``stacks``, unless it is set again and again. One may be in
    use at a time.

    If the C library has no such timers (macOS, musl), faulthandler's thread takes their place.
    """

    def __init__(self, stacks: IO[str]) -> None:
        self._stacks = stacks
        # Its calls keep the lock: a thread that took it in one of them for ever would leave the timers half set.
        self._libc = ctypes.PyDLL(None)
        self._expiry = math.inf
        self._timers: list[ctypes.c_void_p] = []
        self._over = threading.Event()
        if not all(hasattr(self._libc, name) for name in ("timer_create", "timer_settime", "sysv_signal")):
            return
        self._libc.sysv_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self._libc.sysv_signal.restype = ctypes.c_void_p
        grace = _Sigaction(handler=ctypes.cast(self._libc[_GRACE_CALL], ctypes.c_void_p).value)
        self._libc.sigfillset(ctypes.byref(grace.blocked))
        self._libc.sigaction(_GRACE_NUMBER, ctypes.byref(grace), None)
        faulthandler.register(_END_NUMBER, file=stacks, all_threads=True, chain=True)
        thread = threading.Thread(target=self._over.wait, daemon=True, name="kill timer")
        thread.start()
        for number in (_GRACE_NUMBER, _END_NUMBER):
            event = _Sigevent(number=number, notify=_SIGEV_THREAD_ID, thread=thread.native_id)
            timer = ctypes.c_void_p()
            if self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
                self._timers.append(timer)

    def set(self, seconds: float) -> None:
        """End this process `GRACE_SECONDS` after ``seconds``, unless this is called again."""
        if len(self._timers) < 2:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)
            return
        expired = time.monotonic() >= self._expiry
        for timer, delay in zip(self._timers, (seconds, seconds + _BETWEEN_SECONDS), strict=True):
            self._settime(timer, delay)
        self._expiry = time.monotonic() + seconds
        if expired:
            self._drop_pending()

    def end(self) -> None:
        """Cancel the timers. The object can't be set again."""
        if len(self._timers) < 2:
            faulthandler.cancel_dump_traceback_later()
        for timer in self._timers:
            self._settime(timer, 0.0)
            self._libc.timer_delete(timer)
        if self._timers:
            self._drop_pending()
            faulthandler.unregister(_END_NUMBER)
        self._over.set()

    def _drop_pending(self) -> None:
        """A signal that is already pending is dropped once it is ignored."""
        handler = self._libc.sysv_signal(_END_NUMBER, _SIG_IGN)
        self._libc.sysv_signal(_END_NUMBER, handler)

    def _settime(self, timer: ctypes.c_void_p, seconds: float) -> None:
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(int(seconds), int(seconds % 1 * 1e9)))
        self._libc.timer_settime(timer, 0, ctypes.byref(spec), None)
