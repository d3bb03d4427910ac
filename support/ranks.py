# SPDX-License-Identifier: Apache-2.0
"""Runs functions on gloo ranks, for tests, tools and benchmarks. Ranks are forked from a server that has already
imported the slow modules.

A rank starts in about a tenth of a second, without its parent's threads, patches and groups.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    # Several ranks share a few cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Pairs of ranks connect at their first message. A run makes some thirty groups, and most of them never send one.
    "TORCH_GLOO_LAZY_INIT": "1",
}
PRELOAD = ("support.warm",)
"""Modules that a rank has imported when it starts."""
_MAIN = threading.Lock()
_SPENT = threading.local()


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message carries its traceback."""


def prepare(*preload: str) -> None:
    """Set the environment of a process that starts ranks, before it imports torch; ``preload`` are modules to import beside
    `PRELOAD`."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if Path("/sys/class/net/lo").exists():
        # Otherwise gloo looks up the host's name, which may take seconds or lead nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *preload])


def run(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 180.0,
    init_process_group: bool = True,
    env: dict[str, str] | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world`` new processes. Returns the results in order of rank.

    Functions, arguments and results travel by pickle, so ``function`` is one of a module.

    Args:
        function: The function that each rank calls as a rank of one gloo world.
        world: Number of ranks.
        timeout: Seconds until ranks that haven't answered are ended.
        init_process_group: False: only the environment of torchrun is set (RANK, WORLD_SIZE, MASTER_ADDR ...).
        env: Variables to add.
        quiet: Discard the ranks' output. Their stderr is shown if a rank fails.

    Raises:
        RankFailed: with the traceback of the rank that failed first, or where those are that did not answer. No process
            outlives the call.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        _free_port() as port,
        _Ranks(timeout, Path(directory), quiet=quiet) as ranks,
    ):
        common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": 0, "GROUP_RANK": 0}
        if not init_process_group:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        job = {
            "call": pickle.dumps((function, args, kwargs)),
            "modules": _modules_of_tests(),
            "store": str(Path(directory) / "store") if init_process_group else None,
        }
        for rank in range(world):
            own = {"RANK": rank, "LOCAL_RANK": rank}
            environment = {name: str(value) for name, value in (common | own | (env or {})).items()}
            ranks.start(rank, job | {"environment": environment})
        return ranks.results()


def each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``function(*case)`` for each case, on the ranks of one `run`."""
    return [function(*case) for case in cases]


def cpu_seconds() -> float:
    """The processor seconds, user and system, of the ranks that have answered this thread."""
    return getattr(_SPENT, "seconds", 0.0)


class _Ranks:
    """The processes of one call; leaving the context ends whatever is left of them."""

    def __init__(self, timeout: float, directory: Path, *, quiet: bool):
        self.context = multiprocessing.get_context("forkserver")
        self.timeout = timeout
        self.directory = directory
        self.quiet = quiet
        self.processes: list[Any] = []
        self.connections: list[multiprocessing.connection.Connection] = []

    def __enter__(self) -> "_Ranks":
        return self

    def start(self, rank: int, job: dict[str, Any]) -> None:
        receiver, sender = self.context.Pipe(duplex=False)
        job = job | {"connection": sender, "stacks": str(self._stacks(rank)), "timeout": self.timeout}
        job["errors"] = str(self._errors(rank)) if self.quiet else None
        program = str(Path(__file__).with_name("rank_process.py"))
        process = self.context.Process(target=runpy.run_path, args=(program, {"JOB": job}), name=f"rank{rank}")
        with anonymous_main():
            process.start()
        sender.close()
        self.processes.append(process)
        self.connections.append(receiver)

    def results(self) -> list[Any]:
        # Not from the first start: that waits until the server has imported everything, a minute on a busy machine.
        deadline = time.monotonic() + self.timeout
        answers: dict[int, tuple[Any, ...]] = {}
        while len(answers) < len(self.processes):
            waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            # The thread that dumps stacks goes off at the timeout itself; leave it a moment.
            ready = multiprocessing.connection.wait(list(waiting), deadline + 1.0 - time.monotonic())
            if not ready:
                raise RankFailed(
                    f"no answer within {self.timeout} s from rank(s) {sorted(waiting.values())}" + self._dumps()
                )
            for connection in ready:
                rank = waiting[connection]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._answer_of(rank)
            if any(answer[1] == "error" for answer in answers.values()):
                # The other ranks usually fail as a consequence, so the earliest error is shown. It may be one of those, where a
                # rank was killed: a peer hears of it as soon as this process does.
                self._collect_what_has_arrived(answers)
                failed = {rank: answer for rank, answer in answers.items() if answer[1] == "error"}
                first = min(failed, key=lambda rank: failed[rank][0])
                others = "".join(f"\nrank {rank}: {answer[2]}" for rank, answer in failed.items() if rank != first)
                _, _, error, details = failed[first]
                raise RankFailed(f"rank {first} of {len(self.processes)} failed: {error}\n{details}{others}")
        _SPENT.seconds = cpu_seconds() + sum(answer[3] for answer in answers.values())
        return [pickle.loads(answers[rank][2]) for rank in range(len(self.processes))]

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()

    def _collect_what_has_arrived(self, answers: dict[int, tuple[Any, ...]]) -> None:
        for rank, connection in enumerate(self.connections):
            if rank not in answers and connection.poll(0.2):
                answers[rank] = self._answer_of(rank)

    def _answer_of(self, rank: int) -> tuple[Any, ...]:
        """What a rank has sent: the time, "result" or "error", and more."""
        try:
            return self.connections[rank].recv()
        except EOFError:
            return time.time(), "error", f"it ended without an answer{_how(self.processes[rank])}", self._dumps()

    def _stacks(self, rank: int) -> Path:
        return self.directory / f"stacks{rank}"

    def _errors(self, rank: int) -> Path:
        return self.directory / f"errors{rank}"

    def _dumps(self) -> str:
        told = []
        for rank in range(len(self.processes)):
            files = (path for path in (self._errors(rank), self._stacks(rank)) if path.exists())
            if text := "\n".join(text for path in files if (text := path.read_text()[-4000:])):
                told.append(f"\n--- rank {rank}\n{text}")
        return "".join(told)


def _how(process: Any) -> str:
    process.join(1.0)
    code = process.exitcode
    if code is not None and code < 0:
        return f" ({signal.Signals(-code).name}; out of memory?)"
    return "" if code is None else f" (exit code {code})"


@contextlib.contextmanager
def simulated_rank(rank: int, world: int) -> Iterator[None]:
    """A context in which this process is a rank of a world that has no other ranks. Megatron-Core's groups end with it."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def anonymous_main() -> Iterator[None]:
    """Children would import the parent's main module, pytest or a command, again."""
    with _MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _modules_of_tests() -> dict[str, str]:
    """The files of the test modules by their names in this process, for the ranks. Other modules are imported as
    usual."""
    home = f"{ROOT / 'tests'}{os.sep}"
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return {name: file for name, file in files if file and file.startswith(home)}


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port that the system gives to nobody else in the meantime. Torch's store can listen there: it reuses addresses too."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
