# SPDX-License-Identifier: Apache-2.0
"""The process that renders chat templates from elsewhere.

A chat template is a program, so its time, its memory and its output are limited by the operating system, whichever of
Jinja's operators and filters use them. The process may open no file for writing and start no process once its limits
are set. It is started by path, in isolated mode, and imports only the standard library and Jinja. ``argv[1]`` holds the
limits, Jinja's folders and the signals to ignore as JSON. A line of standard input is a request, lines of
standard output are its replies, all JSON (`Renderer.render`). The end of standard input ends the process.

The environment of templates is the one that transformers, vLLM and other engines give them: Jinja's immutable sandbox
with ``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that doesn't
escape HTML, and ``{% generation %}`` blocks.
"""

import contextlib
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KEPT_TEMPLATES = 64


class Stopped(Exception):
    """The template exceeds a limit or accesses what the sandbox forbids."""


class Blocks:
    """Find the text of ``{% generation %}`` blocks by marks around it, which no message contains."""

    def __init__(self) -> None:
        mark = os.urandom(8).hex()
        self.begin, self.end = f"\ufdd0{mark}[", f"\ufdd0{mark}]"
        self.marks = re.compile(f"{re.escape(self.begin)}|{re.escape(self.end)}")

    def spans(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text without marks, and the ranges of characters between them."""
        outside_and_inside = self.marks.split(text)  # by turns
        ends = list(accumulate(map(len, outside_and_inside)))
        return "".join(outside_and_inside), list(zip(ends[::2], ends[1::2], strict=False))


def environment(blocks: Blocks) -> Any:
    """Jinja's sandbox with what chat templates use."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` ... ``{% endgeneration %}``."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{blocks.begin}{caller()}{blocks.end}"

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=True
        )

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


class Renderer:
    """Answer requests.

    Args:
        seconds: Processor time for one rendering.
        memory_bytes: Memory for one rendering, beside what the process needs itself and a multiple of the request.
        output_characters: Characters of one rendering, beside a multiple of the request.
    """

    PER_REQUESTED_BYTE = 64
    """The memory that a byte of a request may need: decoded as UCS-4, in several copies."""
    PER_REQUESTED_CHARACTER = 16

    def __init__(self, seconds: float, memory_bytes: int, output_characters: int) -> None:
        self.seconds, self.memory_bytes, self.output_characters = seconds, memory_bytes, output_characters
        self.blocks = Blocks()
        self.environment = environment(self.blocks)
        self.compiled = lru_cache(_KEPT_TEMPLATES)(self.environment.from_string)

    def render(self, line: bytes) -> Iterator[dict[str, Any]]:
        """The replies to a request, one for each rendering.

        A request has ``template``, ``variables`` (values by name), ``messages`` and ``prefixes``: for each rendering, how
        many messages it has (null: all), and whether the prompt of the next answer follows. A reply has the ``text`` with
        the ``spans`` of generation blocks, or ``error``. A reply with ``stopped`` is the last one: the template exceeded a
        limit.
        """
        import jinja2
        from jinja2.exceptions import SecurityError

        self.limit(len(line))
        try:
            request = json.loads(line)
            try:
                template = self.compiled(request["template"])
            except (jinja2.TemplateSyntaxError, jinja2.TemplateAssertionError) as error:
                for _ in request["prefixes"]:
                    yield {"error": f"{type(error).__name__}: {error}"}
                return
            most = self.output_characters + self.PER_REQUESTED_CHARACTER * len(line)
            for count, prompt in request["prefixes"]:
                self.limit(len(line))
                variables = {
                    **request["variables"],
                    "messages": request["messages"][:count],
                    "add_generation_prompt": prompt,
                }
                yield self.rendering(template, variables, most)
        except SecurityError as error:
            yield {"stopped": str(error) or "it accesses what the sandbox forbids"}
        except MemoryError:
            yield {"stopped": f"it needs more than {self.memory_bytes >> 20} MiB of memory"}
        except (OverflowError, RecursionError, Stopped) as error:
            yield {"stopped": str(error) if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"}

    def rendering(self, template: Any, variables: dict[str, Any], most: int) -> dict[str, Any]:
        from jinja2.exceptions import SecurityError

        try:
            pieces, length = [], 0
            for piece in template.generate(variables):
                length += len(piece)
                if length > most:
                    raise Stopped(f"it renders more than {most:,} characters")
                pieces.append(piece)
        except (SecurityError, MemoryError, OverflowError, RecursionError, Stopped):
            raise
        except Exception as error:  # any other error of a template
            return {"error": f"{type(error).__name__}: {error}"}
        text, spans = self.blocks.spans("".join(pieces))
        return {"text": text, "spans": spans}

    def limit(self, request_bytes: int) -> None:
        """Set this process's limits of time and memory to those of a request."""
        with contextlib.suppress(ValueError, OSError):  # a lower limit of the parent stays
            seconds = math.ceil(time.process_time() + self.seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        with contextlib.suppress(ValueError, OSError):
            memory = _virtual_bytes() + self.memory_bytes + self.PER_REQUESTED_BYTE * request_bytes
            resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _virtual_bytes() -> int:
    """The address space in use. 0 where the system doesn't tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * _PAGE_BYTES
    except OSError:
        return 0


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += [folder for folder in settings["folders"] if folder not in sys.path]
    for number in settings["ignored_signals"]:
        signal.signal(number, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    renderer = Renderer(settings["seconds"], settings["memory_bytes"], settings["output_characters"])
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    for line in requests:
        for reply in renderer.render(line):
            replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
