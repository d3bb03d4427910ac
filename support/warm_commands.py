# SPDX-License-Identifier: Apache-2.0
"""Python commands of a shell, run in forks of a process that has imported the slow things once.

`serve` puts a ``python`` and the named console scripts into a folder that goes first on the PATH. Each hands its arguments,
variables, working directory and streams to the server, which forks, and ends as the fork ends. The launchers and ranks that
such a command starts as ``sys.executable`` come the same way. A signal is passed on; a command that is killed takes its fork
with it. A module that isn't in `WARM`, and ``python -c``, run in a fresh interpreter.
"""

import array
import contextlib
import io
import json
import os
import runpy
import select
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

SOCKET = "NEMO2_WARM_COMMANDS"
WARM = (
    "nemo2",
    "bench.gpu",
    "bench.gpu.memory",
    "torch.distributed.run",
    "nemo_run.core.runners.fdl_runner",
    "nemo2.launch.rank",
    "nemo2.launch.slurm.job_result",
    "nemo2.preflight.planner.fit",
    "ipykernel_launcher",
)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_COMMAND = '#!{python} -IS\nimport runpy, sys\nsys.argv[0] = {name!r}\nrunpy.run_path({file!r})["ask"]({python!r})\n'


def serve(folder: Path, scripts: Sequence[str] = ("nemo2",)) -> dict[str, str]:
    """Fork the server of commands and write them to ``folder``; the variables that lead a shell to them.

    What is imported here is imported there. The server ends with this process.
    """
    folder.mkdir()
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    beside = Path(sys.executable).parent
    for name in ("python", "python3", *scripts):
        command = folder / name
        real = sys.executable if name.startswith("python") else str(beside / name)
        command.write_text(_COMMAND.format(python=sys.executable, name=real, file=__file__))
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    parent, ours = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        _loop(listener, until=parent, python=str(folder / "python"))
        os._exit(0)
    os.close(parent)
    listener.close()
    return {SOCKET: address, "PATH": f"{folder}{os.pathsep}{beside}{os.pathsep}{os.environ['PATH']}"}


# ------------------------------------------------------------------------------------------------------ a command


def ask(python: str) -> None:
    """Run this process's command in a fork of the server; its end is this process's."""
    address, (command, *arguments) = os.environ.get(SOCKET), sys.argv
    module = None
    if command == python and arguments[:1] == [
        "-u"
    ]:  # as torchrun starts ranks; what they print is flushed at their end
        arguments = arguments[1:]
    if command == python and arguments[:1] == ["-m"]:
        module, arguments = arguments[1], arguments[2:]
    elif command == python and arguments and os.path.isfile(arguments[0]):
        command, arguments = arguments[0], arguments[1:]
    known = module in WARM if module is not None else command != python
    if address is None or not known:
        os.execv(command, [command, *sys.argv[1:]])
    job = {
        "module": module,
        "script": command,
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until their destination is known
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        streams = array.array("i", [0, 1, 2])
        data = json.dumps(job).encode()
        server.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        server.sendall(data)
        pid = int.from_bytes(_exactly(server, 8), "big")
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda got, _: os.kill(pid, got))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        status = int.from_bytes(_exactly(server, 8), "big")
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the server of warm commands is gone")
        data += more
    return data


# ------------------------------------------------------------------------------------------------------ the server


def _loop(listener: socket.socket, *, until: int, python: str) -> None:
    """Fork for each command that comes, until the pipe ``until`` is closed."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # a terminal's are for the commands
    commands: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, until, wake_read, *commands], [], [])
        if until in ready:
            for pid in commands.values():
                os.kill(pid, signal.SIGKILL)
            return
        if wake_read in ready:
            os.read(wake_read, 4096)
        for connection in [one for one in ready if one in commands]:  # it says nothing more: it was killed
            os.kill(commands[connection], signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            pid = _fork(
                connection,
                [listener.fileno(), until, wake_read, wake_write, *(one.fileno() for one in commands)],
                python,
            )
            connection.sendall(pid.to_bytes(8, "big"))
            commands[connection] = pid
        for connection, pid in list(commands.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del commands[connection]
                with contextlib.suppress(OSError):  # it was killed, and nobody asks
                    connection.sendall(status.to_bytes(8, "big"))
                connection.close()


def _fork(connection: socket.socket, others: Sequence[int], python: str) -> int:
    first, control, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    streams.frombytes(control[0][2])
    job = json.loads(_exactly(connection, int.from_bytes(first, "big")))
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *_PASSED_ON):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for descriptor in (*others, connection.fileno()):
            os.close(descriptor)
        _run(job, streams, python)
    for descriptor in streams:
        os.close(descriptor)
    return pid


def _run(job: dict[str, Any], streams: Sequence[int], python: str) -> NoReturn:
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    for name, target in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(target, "w", closefd=False))
        at_once = target == 2 or os.isatty(target) or bool(job["environment"].get("PYTHONUNBUFFERED"))
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", line_buffering=at_once))
    os.chdir(job["folder"])
    for name in set(os.environ) - set(job["environment"]):
        del os.environ[name]
    os.environ.update(job["environment"])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in given if folder and folder not in sys.path]
    sys.executable = python
    if nemo_run := sys.modules.get("nemo_run.config"):  # which reads it once, when it is imported
        nemo_run.set_nemorun_home(os.environ.get("NEMORUN_HOME", "~/.nemo_run"))
    code = 0
    try:
        if job["module"] is not None:
            sys.argv = ["-m", *job["arguments"]]
            if "PYTHONSAFEPATH" not in os.environ:
                sys.path.insert(0, job["folder"])
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [job["script"], *job["arguments"]]
            sys.path.insert(0, os.path.dirname(os.path.abspath(job["script"])))
            runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        code = 1
    from nemo2.cli.streams import end_process

    end_process(code)


@contextlib.contextmanager
def started(folder: Path, scripts: Sequence[str] = ("nemo2",)) -> Iterator[dict[str, str]]:
    """`serve` in a process that is forked, as a rank is, from the server that has imported the slow things; ends with the
    context."""
    import multiprocessing

    from support import ranks  # not above: a command reads this file without the checkout on its path

    context = multiprocessing.get_context("forkserver")
    connection, theirs = context.Pipe()
    process = context.Process(target=_serve_until_closed, args=(theirs, folder, tuple(scripts)))
    with ranks.anonymous_main():
        process.start()
    theirs.close()
    try:
        yield connection.recv()
    finally:
        with contextlib.suppress(OSError):  # not by closing alone: a fork of this process may have the connection too
            connection.send(None)
        connection.close()
        process.join(60)


def _serve_until_closed(connection: Any, folder: Path, scripts: Sequence[str]) -> None:
    import multiprocessing

    import nemo_run  # noqa: F401

    from support import ranks

    multiprocessing.set_start_method(None, force=True)  # a command's own is the platform's, not forkserver
    # Of the parent's paths to modules a command keeps the checkout, which holds this package, and what is installed.
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(ranks.ROOT / "tests")]
    connection.send(serve(folder, scripts))
    with contextlib.suppress(EOFError):
        connection.recv()
