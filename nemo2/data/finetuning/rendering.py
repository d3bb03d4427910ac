# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates from elsewhere, which are Jinja programs that come with a tokenizer, without access to
anything else.

transformers renders them in Jinja's immutable sandbox. Anything that the sandbox stops is an attack rather than a fault
of a record, and the error names the tokenizer's or the template's file. This module limits two things that the sandbox
allows: text created by a multiplication, and loops within loops.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from nemo2.data.finetuning.sample import Malformed
from nemo2.errors import SecurityError

MOST_SECONDS = 10.0
"""The processor time for one conversation. Templates take some milliseconds."""
MOST_CHARACTERS = 1 << 20
"""The largest text that a template's ``*`` may create."""


def render(tokenizer: Any, messages: list[Any], *, template: str, source: str, **options: Any) -> Any:
    """``tokenizer.apply_chat_template`` with limits on time and size.

    Args:
        tokenizer: The ``transformers`` object.
        source: The template's origin, for error messages.

    Raises:
        Malformed: the template fails on these messages.
        SecurityError: the template accesses Python's internals, or exceeds a limit.
    """
    from jinja2.exceptions import SecurityError as Reached

    try:
        with _bounded_products(), _within(MOST_SECONDS):
            return tokenizer.apply_chat_template(messages, chat_template=template, **options)
    except (Reached, _TooMuch) as error:
        raise SecurityError(
            f"The chat template of {source} was stopped: {_shortened(error)}. A chat template should only render messages. "
            f"Read it before you use this tokenizer, or set your own template (dataset_kwargs={{'chat_template': "
            f"...}})."
        ) from error
    except (MemoryError, OverflowError, RecursionError) as error:
        raise SecurityError(
            f"The chat template of {source} produces more than any text needs ({type(error).__name__}: "
            f"{_shortened(error)}), so it is not a template of a conversation. Set another template "
            f"(dataset_kwargs={{'chat_template': ...}})."
        ) from error
    except Exception as error:  # any other error of a template, including Jinja's
        raise Malformed(f"the chat template fails: {type(error).__name__}: {_shortened(error)}") from error


class _TooMuch(Exception):
    """A limit of nemo2 was exceeded."""


@contextlib.contextmanager
def _bounded_products() -> Iterator[None]:
    """In this context, compiled templates check the size of ``*`` and ``**``."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

    before = Sandbox.intercepted_binops, Sandbox.call_binop
    Sandbox.intercepted_binops, Sandbox.call_binop = frozenset({"*", "**"}), _product  # pyright: ignore
    try:
        yield
    finally:
        Sandbox.intercepted_binops, Sandbox.call_binop = before


def _product(environment: Any, context: Any, operator: str, left: Any, right: Any) -> Any:
    del context
    if operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 64):
        raise _TooMuch(f"{left!r} ** {right!r}")
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int) and len(sequence) * times > MOST_CHARACTERS:
            raise _TooMuch(f"a product of {len(sequence)} characters or values and {times}")
    return environment.binop_table[operator](left, right)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise in this thread after this much processor time. Only the main thread is limited, because signals don't reach
    other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = time.thread_time() + seconds

    def over(number: int, frame: Any) -> None:
        del number, frame
        if time.thread_time() >= end:  # the timer also counts the time of other threads
            raise _TooMuch(f"it was still running after {seconds:.0f} s")
        signal.setitimer(signal.ITIMER_VIRTUAL, max(0.01, end - time.thread_time()))

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
