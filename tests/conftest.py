# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: the environment, other libraries' warnings, and functions run on gloo ranks."""

import atexit
import functools
import gc
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nemo2.base.noise import VERBOSE_VARIABLE
from support import ranks, without_flushes
from support import warm_commands as warm_commands_module

# Whatever a test submits stays out of the user's own list. nemo-run reads the variable when it is imported.
os.environ["NEMORUN_HOME"] = tempfile.mkdtemp(prefix="nemo_run-")
atexit.register(shutil.rmtree, os.environ["NEMORUN_HOME"], True)

ranks.prepare(without_flushes.__name__)  # before anything imports torch

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes a million objects that stay. The garbage collector would look through them again and again: half of the
    time that collecting takes, and a second each time a test makes it look through everything."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among workers, long files first, so that none is left alone with one at the end; each file keeps its order.

    ``--dist loadfile`` hands files out in this order under ``--no-loadscope-reorder``; its own order, by number of tests, ends
    with the files of a single long test.
    """
    if not hasattr(config, "workerinput"):
        return
    seconds: dict[Path, float] = {}
    starts = {path: "subprocess" in path.read_text() for path in {item.path for item in items}}
    for item in items:
        guess = 2.0 if starts[item.path] or "run_on_ranks" in getattr(item, "fixturenames", ()) else 0.1
        seconds[item.path] = seconds.get(item.path, 0.0) + (30.0 if item.get_closest_marker("slow") else guess)
    items.sort(key=lambda item: -seconds[item.path])


class Printed(NamedTuple):
    """What a command has printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Runs a command of nemo2 in this process, which has to end with ``code``: ``command("runs list", *words, code=0)``.

    The line is split as a shell splits it; the words behind it are taken as they are.
    """
    from nemo2.cli.app import main

    def run(line: str, *words: Any, code: int = 0) -> Printed:
        capsys.readouterr()
        ended, printed = main([*shlex.split(line), *map(str, words)]), Printed(*capsys.readouterr())
        assert ended == code, printed
        return printed

    return run


@pytest.fixture(scope="session")
def run_on_ranks() -> Callable[..., list[Any]]:
    """`support.ranks.run`: ``run_on_ranks(function, world, *args, timeout=180, env=None, **kwargs)``."""
    return ranks.run


@pytest.fixture(scope="session")
def warm_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables under which a shell's ``nemo2``, ``nemo`` and ``python SCRIPT`` are forks of a process that has imported what
    they import (`support.warm_commands`)."""
    with warm_commands_module.started(
        tmp_path_factory.mktemp("commands") / "bin", ("nemo2", "nemo", "torchrun")
    ) as variables:
        yield variables


@pytest.fixture
def warm_interpreter(warm_commands: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """``sys.executable`` for a test: what this process and its launches start with it are forks, as in `warm_commands`."""
    folder = warm_commands["PATH"].partition(os.pathsep)[0]
    monkeypatch.setenv(warm_commands_module.SOCKET, warm_commands[warm_commands_module.SOCKET])
    monkeypatch.setenv("PATH", os.pathsep.join([folder, os.environ["PATH"]]))
    python = str(Path(folder, "python"))
    monkeypatch.setattr(sys, "executable", python)
    return python


@pytest.fixture
def no_own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test starts without recipes of a user's own, and those in its folder leave no module, path or variable behind."""
    from nemo2.recipes import _own

    before = set(sys.modules)
    monkeypatch.setattr(_own, "_loaded", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.delenv(_own.VARIABLE, raising=False)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def signals_mean_what_they_mean() -> Iterator[None]:
    """What nohup starts ignores the end of a terminal, what a shell starts in the background ignores Ctrl-C, and both hand that
    on: runs of tests say themselves which are to."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.getsignal(signal.SIGINT)
    if before[1] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before[0])
    signal.signal(signal.SIGINT, before[1])


@pytest.fixture(autouse=True)
def verbosity_ends_with_a_test() -> Iterator[None]:
    """``nemo2 -v`` sets a variable, which ranks inherit: so would all later tests, if a test calls it in this process."""
    before = os.environ.get(VERBOSE_VARIABLE)
    yield
    if before is None:
        os.environ.pop(VERBOSE_VARIABLE, None)
    else:
        os.environ[VERBOSE_VARIABLE] = before


@pytest.fixture(autouse=True)
def a_log_file_ends_with_a_test() -> Iterator[None]:
    """A run that a test sets up and doesn't end would write later tests' messages into its folder, which is removed."""
    yield
    if log_files := sys.modules.get("nemo2.training.run_dir.log_files"):
        log_files.remove_log_file()


@pytest.fixture(autouse=True, scope="session")
def callbacks_of_other_distributions_are_looked_up_once() -> None:
    """Each trainer asks which callbacks the installed distributions bring, and Python reads the files of all of them for it:
    most of what a trainer takes. Ranks know the answer (`support.warm`)."""
    if registry := sys.modules.get("lightning.fabric.utilities.registry"):
        registry.entry_points = functools.cache(registry.entry_points)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """A file that leaves torch's process group up would change what the next file of this worker sees."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this file's tests left a process group: run on ranks what makes one, or take it down")
