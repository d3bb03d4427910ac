# SPDX-License-Identifier: Apache-2.0
"""The code blocks of a Markdown page, and running them in order. Run as a script: a server that forks once per page; with
a page as argument, runs this page here, its blocks for Slurm too.

Blocks marked ``python`` and ``bash`` run, a page's in one process and one folder, top to bottom. A comment above a block
says what is different about it:

    <!-- test: skip, REASON -->      it doesn't run; the reason says what it would need
    <!-- test: file NAME -->         it is written to NAME, for a later block to run
    <!-- test: with A=1 B=2 -->      changes added to its ``nemo2 pretrain`` lines, to make them short
    <!-- test: exits 1 -->           its commands end with this exit code, in place of 0
    <!-- test: prints -->            a ``text`` block: every line was printed by the block before; ``...`` may stand for
                                     anything within a line, or for lines
    <!-- test: slurm -->             it runs on a Slurm of two nodes only (``python -m tests.long.cluster --only tutorial``);
                                     another note may follow, as in ``slurm, prints``

A page with ``<!-- test: after PAGE -->`` continues in the folder of another page, which runs first.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SECONDS: float = 150

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


_AFTER = re.compile(r"^<!-- test: after (\S+) -->$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """``line`` is where its text begins in the page; ``note`` what the comment says, "" without one."""

    page: str
    line: int
    language: str
    note: str
    text: str

    @property
    def runs(self) -> bool:
        if self.note == "prints" or self.note.startswith("file "):
            return True
        return not self.needs_slurm and not self.note.startswith("skip,") and self.language in ("python", "bash")

    @property
    def needs_slurm(self) -> bool:
        return self.note.partition(", ")[0] == "slurm"

    def on_slurm(self) -> "Block":
        """The block as it runs on a cluster."""
        return replace(self, note=self.note.partition(", ")[2]) if self.needs_slurm else self


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of `page`."""
    content = page.read_text()
    return [
        Block(
            page=str(page),
            line=content.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            note=match["note"] or "",
            text=match["text"],
        )
        for match in _BLOCK.finditer(content)
    ]


def page_before(page: Path) -> Path | None:
    """The page in whose folder `page` continues. None: it starts in an empty one."""
    match = _AFTER.search(page.read_text())
    return page.parent / match[1] if match else None


def run_page(blocks: list[Block]) -> str | None:
    """Run the blocks of a page here; the first failure as text, None if there is none."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks:
        try:
            if block.note == "prints":
                if missing := not_printed(block.text, printed):
                    raise AssertionError(f"not printed: {missing}\nby the block before, which printed:\n{printed}")
            elif block.note.startswith("file "):
                Path(block.note.removeprefix("file ")).write_text(block.text)
            elif block.language == "python":
                printed = run_python(block, namespace)
            else:
                printed = run_bash(block)
        except BaseException:
            return f"{block.page}:{block.line}\n{traceback.format_exc()}"
    return None


def run_python(block: Block, namespace: dict[str, Any]) -> str:
    # Empty lines in front, so that a traceback shows the page's own line numbers.
    code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    return output.getvalue()


def run_bash(block: Block) -> str:
    text = block.text
    if block.note.startswith("with "):
        changes = block.note.removeprefix("with ")
        text = re.sub(r"^(nemo2 pretrain \S+)", rf"\1 {changes}", text, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=BLOCK_SECONDS,
    )
    expected = int(block.note.removeprefix("exits ")) if block.note.startswith("exits ") else 0
    if done.returncode != expected:
        raise AssertionError(f"exit code {done.returncode} of\n{text}\nwhich printed\n{done.stdout}")
    return done.stdout


def not_printed(expected: str, printed: str) -> str | None:
    """The first line of `expected` that doesn't follow in `printed`; None if all do, in their order."""
    lines = [line.rstrip() for line in printed.splitlines()]
    for line in expected.splitlines():
        if line.strip() in ("...", ""):
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.rstrip().split("...")))
        found = next((index for index, text in enumerate(lines) if pattern.fullmatch(text)), None)
        if found is None:
            return line
        lines = lines[found + 1 :]
    return None


def serve() -> None:
    """Answer each line on standard input, ``{"folder": ..., "blocks": [...]}``, with one line: the failure or null.

    What every page imports is imported here, once; each page gets a fork, so that no page sees what another has built. Its
    ``nemo2`` commands, and the ranks that they start, are forks too (`support.warm_commands`).
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import nemo_run  # noqa: F401

    sys.path.append(str(ROOT))
    import support.warm  # noqa: F401
    from support.warm_commands import serve as serve_commands

    folder = Path(tempfile.mkdtemp())
    os.environ.update(serve_commands(folder / "bin"))
    for line in sys.stdin:
        request = json.loads(line)
        result = Path(request["folder"]) / ".result.json"
        pid = os.fork()
        if pid == 0:
            os.chdir(request["folder"])
            failure = run_page([Block(**block) for block in request["blocks"]])
            result.write_text(json.dumps(failure))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        answer = (
            result.read_text() if result.is_file() else json.dumps(f"the page's process ended with status {status}")
        )
        print(answer, file=answers, flush=True)
    shutil.rmtree(folder)


def request(folder: Path, blocks: list[Block]) -> str:
    return json.dumps({"folder": str(folder), "blocks": [asdict(block) for block in blocks]}) + "\n"


def run_on_slurm(page: Path, *, block_seconds: float) -> None:
    """Run a page in the working directory, on the cluster of ``SLURM_CONF``. Ends the process with the first failure."""
    global BLOCK_SECONDS
    BLOCK_SECONDS = block_seconds
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    blocks = [block for block in map(Block.on_slurm, blocks_of(page)) if block.runs]
    sys.exit(run_page(blocks) or print(f"{len(blocks)} blocks ran"))


if __name__ == "__main__":
    run_on_slurm(Path(sys.argv[1]), block_seconds=600) if sys.argv[1:] else serve()
