# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates from elsewhere, which are Jinja programs that come with a tokenizer.

One child process (`nemo2.data.finetuning.rendering_process`) renders all conversations of this process. The operating
system limits its processor time and its memory, so no operator or filter of a template has to be watched. What the
sandbox or a limit stops is an attack rather than a fault of a record, and the error names the template's origin.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from nemo2.base.errors import ConfigError, SecurityError
from nemo2.base.helper_signals import IGNORED_SIGNALS
from nemo2.data.finetuning.sample import Malformed

_SCRIPT = Path(__file__).with_name("rendering_process.py")
_PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
"""The variables of the environment that the process receives: what starts the interpreter, and the time zone of dates."""
_REPLY_BYTES_PER_CHARACTER = 12
"""A character of JSON: two escaped surrogates."""


class Rendering(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: What the template writes.
        spans: The ranges of characters inside ``{% generation %}`` blocks, in order.
    """

    text: str
    spans: list[tuple[int, int]]


class Prefix(NamedTuple):
    """The beginning of a conversation, to be rendered.

    Attributes:
        count: The number of messages. None: all.
        prompt: Whether the prompt of the assistant's next answer follows.
    """

    count: Optional[int] = None
    prompt: bool = False


Rendered = Union[Rendering, Malformed]
"""A rendering, or the error of the template."""


class Renderer:
    """Render chat templates in a child process, which is started on first use and after it was stopped.

    Args:
        seconds: Processor time for one rendering. Templates take some milliseconds.
        memory_bytes: Memory for one rendering, beside a multiple of the conversation's size.
        output_characters: Characters of one rendering, beside a multiple of the conversation's size.
    """

    def __init__(self, seconds: float = 10.0, memory_bytes: int = 256 << 20, output_characters: int = 1 << 20) -> None:
        self.seconds, self.memory_bytes, self.output_characters = seconds, memory_bytes, output_characters
        self._lock = threading.Lock()
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._owner = 0

    def render(
        self,
        messages: Sequence[Any],
        prefixes: Sequence[Prefix],
        *,
        template: str,
        source: str,
        variables: Mapping[str, Any],
    ) -> list[Rendered]:
        """The renderings of these beginnings of a conversation, in order.

        Args:
            source: The template's origin, for error messages.
            variables: What the template reads beside messages and prompt, such as tools and special tokens.

        Raises:
            Malformed: the messages are not plain data.
            SecurityError: the template accesses Python's internals, or exceeds a limit.
        """
        request = {"template": template, "variables": variables, "messages": messages, "prefixes": prefixes}
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise Malformed(f"the messages are not plain data: {error}") from error
        return [
            Malformed(f"the chat template fails: {_shortened(reply['error'])}")
            if "error" in reply
            else Rendering(reply["text"], [(start, end) for start, end in reply["spans"]])
            for reply in self._replies(line, len(prefixes), source)
        ]

    def close(self) -> None:
        """End the process. A later call starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _replies(self, line: bytes, count: int, source: str) -> list[dict[str, Any]]:
        most = _REPLY_BYTES_PER_CHARACTER * 16 * (self.output_characters + len(line))
        replies: list[dict[str, Any]] = []
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None and process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # how it ended is known below
                    process.stdin.write(line)
                    process.stdin.flush()
                while len(replies) < count:
                    reply = process.stdout.readline(most)
                    if not reply.endswith(b"\n"):
                        break
                    replies.append(json.loads(reply))
                    if "stopped" in replies[-1]:
                        raise _stopped(source, replies[-1]["stopped"])
                else:
                    return replies
                if reply and process.poll() is None:
                    raise _stopped(source, f"it renders more than {most:,} bytes")
                ended = process.wait()
                if ended == -signal.SIGXCPU:
                    raise _stopped(source, f"it was still running after {self.seconds:g} s of processor time")
                raise _stopped(source, f"its process ended with {_named(ended)}")
            except BaseException:  # an interrupt too: a reply that nobody read would answer the next request
                self.close()
                raise

    def _running(self) -> "subprocess.Popen[bytes]":
        process = self._process
        if process is not None and self._owner == os.getpid() and process.poll() is None:
            return process
        if self._owner == os.getpid():
            self.close()
        settings = {
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "output_characters": self.output_characters,
            "folders": _folders_of_jinja(),
            "ignored_signals": IGNORED_SIGNALS,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_SCRIPT), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
        self._owner = os.getpid()
        return self._process


def _folders_of_jinja() -> list[str]:
    """The folders of the packages that the process imports, which isolated mode may not search."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    if None in specs:
        raise ConfigError("Chat templates require the package jinja2: pip install jinja2.")
    return sorted({str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin})


def _stopped(source: str, why: str) -> SecurityError:
    return SecurityError(
        f"The chat template of {source} was stopped: {_shortened(why)}. A chat template should only render messages. "
        f"Read it before you use this tokenizer, or set your own template (dataset_kwargs={{'chat_template': ...}})."
    )


def _named(status: int) -> str:
    try:
        return signal.Signals(-status).name if status < 0 else f"exit code {status}"
    except ValueError:
        return f"exit code {status}"


def _shortened(text: str) -> str:
    return " ".join(text.split())[:300]


RENDERER = Renderer()
"""The renderer of this process."""
atexit.register(RENDERER.close)


def _forget() -> None:
    """A forked process has its own renderer: the pipes of its parent's would mix their replies."""
    RENDERER._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
