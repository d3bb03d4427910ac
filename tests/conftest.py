# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the environment, other libraries' warnings, and functions run on gloo ranks."""

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
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch: several ranks share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
if Path("/sys/class/net/lo").exists():
    # Otherwise gloo looks up the host's name, which may take seconds or lead nowhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# By message or by module, never by category alone: ours must stay errors.
OTHER_LIBRARIES_WARNINGS = (
    "ignore:.*Falling back to (Torch|local).*:UserWarning",
    "ignore:Apex is not installed:UserWarning",
    "ignore:full scope is deprecated:UserWarning",
    "ignore:.*flash.attn.*not installed:UserWarning",
    "ignore::DeprecationWarning:megatron",
    "ignore::FutureWarning:megatron",
    "ignore::SyntaxWarning:megatron",
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore::DeprecationWarning:lightning",
    "ignore::DeprecationWarning:leptonai",
    "ignore::DeprecationWarning:pydantic",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in OTHER_LIBRARIES_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message carries its traceback."""


@pytest.fixture(scope="session")
def run_on_ranks(_rank_server: Any) -> Callable[..., list[Any]]:
    """`run_on_ranks(fn, world_size, *args, timeout=180, init_process_group=True, env=None, **kwargs)`.

    Calls `fn(*args, **kwargs)`, a module-level function, in `world_size` new processes that torch.distributed knows as
    ranks of one gloo world, and returns what each returned, in order of rank. With `init_process_group=False` only the
    environment of torchrun is set (RANK, WORLD_SIZE, MASTER_ADDR ...). `env` adds variables.

    Functions, arguments and results travel by pickle. Inside `fn`, `import bench.<name>` and `import tools.<name>` work
    too. Raises `RankFailed` with the traceback of the rank that failed first; no process outlives the call.
    """

    def run(
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 180.0,
        init_process_group: bool = True,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        with tempfile.TemporaryDirectory() as directory, _Ranks(_rank_server, timeout, Path(directory)) as ranks:
            common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "NODE_RANK": 0, "GROUP_RANK": 0}
            if not init_process_group:
                common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
            job = {
                "call": pickle.dumps((fn, args, kwargs)),
                "modules": _modules_of_this_checkout(),
                "store": str(Path(directory) / "store") if init_process_group else None,
            }
            for rank in range(world_size):
                own = {"RANK": rank, "LOCAL_RANK": rank}
                environment = {name: str(value) for name, value in (common | own | (env or {})).items()}
                ranks.start(rank, job | {"environment": environment})
            return ranks.results()

    return run


@pytest.fixture(scope="session")
def _rank_server() -> Any:
    """Processes are forked from a server that has imported the slow things once: a rank starts in about 0.1 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch.distributed",
            "torch._dynamo",  # torch imports it when the first optimizer is made: a second and more per rank
            "lightning.pytorch",
            "megatron.core.distributed",
            "megatron.core.dist_checkpointing",
            "megatron.core.models.gpt",
            "megatron.core.optimizer",
            "megatron.core.pipeline_parallel",
            "nemo2.backend.cpu",
        ]
    )
    return context


class _Ranks:
    """The processes of one call; leaving the context ends whatever is left of them."""

    def __init__(self, context: Any, timeout: float, directory: Path):
        self.context = context
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.directory = directory
        self.processes: list[Any] = []
        self.connections: list[multiprocessing.connection.Connection] = []

    def __enter__(self) -> "_Ranks":
        return self

    def start(self, rank: int, job: dict[str, Any]) -> None:
        receiver, sender = self.context.Pipe(duplex=False)
        job = job | {"connection": sender, "stacks": str(self._stacks(rank)), "timeout": self.timeout}
        program = str(Path(__file__).with_name("rank_process.py"))
        process = self.context.Process(target=runpy.run_path, args=(program, {"JOB": job}), name=f"rank{rank}")
        with _anonymous_main():
            process.start()
        sender.close()
        self.processes.append(process)
        self.connections.append(receiver)

    def results(self) -> list[Any]:
        answers: dict[int, tuple[Any, ...]] = {}
        while len(answers) < len(self.processes):
            waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            # The thread that dumps stacks goes off at the timeout itself; leave it a moment.
            ready = multiprocessing.connection.wait(list(waiting), self.deadline + 1.0 - time.monotonic())
            if not ready:
                raise RankFailed(
                    f"no answer within {self.timeout} s from rank(s) {sorted(waiting.values())}" + self._dumps()
                )
            for connection in ready:
                rank = waiting[connection]  # pyright: ignore[reportArgumentType]
                try:
                    answers[rank] = connection.recv()  # pyright: ignore[reportAttributeAccessIssue]
                except EOFError:
                    answers[rank] = (time.time(), "error", "it ended without an answer (killed, or out of memory?)", "")
            if any(answer[1] == "error" for answer in answers.values()):
                # The others usually fail as a consequence; the earliest is the one to show.
                self.deadline = min(self.deadline, time.monotonic())
                self._collect_what_has_arrived(answers)
                rank, answer = min(((r, a) for r, a in answers.items() if a[1] == "error"), key=lambda item: item[1][0])
                raise RankFailed(f"rank {rank} of {len(self.processes)} failed: {answer[2]}\n{answer[3]}")
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
            if rank not in answers:
                with contextlib.suppress(EOFError):
                    if connection.poll(0.2):
                        answers[rank] = connection.recv()

    def _stacks(self, rank: int) -> Path:
        return self.directory / f"stacks{rank}"

    def _dumps(self) -> str:
        files = ((rank, self._stacks(rank)) for rank in range(len(self.processes)))
        return "".join(f"\n--- rank {rank}\n{path.read_text()}" for rank, path in files if path.exists())


@contextlib.contextmanager
def _anonymous_main() -> Iterator[None]:
    """Children would import the parent's main module, pytest, again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _modules_of_this_checkout() -> dict[str, str]:
    """Where a rank finds the test modules, by the names they have in this process, and those of bench/ and tools/."""
    home = f"{ROOT / 'tests'}{os.sep}"
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    files_of_ours = [*(ROOT / "bench").glob("*.py"), *(ROOT / "tools").rglob("*.py")]
    ours = {".".join(path.relative_to(ROOT).with_suffix("").parts): str(path) for path in files_of_ours}
    return ours | {name: file for name, file in files if file and file.startswith(home)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
