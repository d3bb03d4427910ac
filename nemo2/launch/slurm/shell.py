# SPDX-License-Identifier: Apache-2.0
"""Runs commands and copies files where sbatch is: on this machine, or on a login node over nemo-run's SSH tunnel.

Commands are Bash, and callers quote every word of the user's. The tunnel's own shell receives ``bash -c`` and one word.
"""

import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.base.noise import verbose

_log = logging.getLogger(__name__)


class LocalShell:
    """A shell of this machine."""

    local = True
    """Whether paths of this machine are valid there."""

    def run(self, command: str) -> tuple[int, str, str]:
        """The exit code, standard output and standard error of ``bash -c command``."""
        # Not as text, which would treat a bar's carriage return as the end of a line.
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def place(self, source: Path, target: str) -> None:
        """Copy a folder with its modes to a path that doesn't exist yet. Parent folders are created.

        Raises:
            RuntimeFault: the target isn't writable.
        """
        try:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target, symlinks=True)
        except OSError as error:
            # copytree's own error is a list of the errors of each file.
            first = error.args[0][0][2] if isinstance(error, shutil.Error) else str(error)
            fix = "The disk is full: make room" if "No space left" in first else "Check who may write there"
            raise RuntimeFault(f"{target} can't be written: {first}. {fix}, or set job_dir elsewhere.") from error


class _Quiet:
    """In place of the tunnel's console, on which nemo-run says "Connecting to ...": answers of commands are data."""

    def log(self, *words: Any) -> None:
        text = re.sub(r"\[/?[a-z ]+\]", "", " ".join(map(str, words)))
        _log.info("%s", text)
        if verbose():
            print(text, file=sys.stderr)


class TunnelShell:
    """A shell over ``nemo_run.SSHTunnel``, which keeps one connection open.

    paramiko, which it uses, accepts any unknown host key (nemo-run 0.11). To have a key checked, add it to known_hosts;
    a changed key is then rejected.
    """

    local = False

    def __init__(self, tunnel: Any) -> None:
        self._tunnel = tunnel
        tunnel.console = _Quiet()

    def run(self, command: str) -> tuple[int, str, str]:
        with self._translated_errors():
            done = self._tunnel.run(f"bash -c {shlex.quote(command)}", hide=True, warn=True)
        return done.exited, done.stdout, done.stderr

    def place(self, source: Path, target: str) -> None:
        parent, quoted = shlex.quote(os.path.dirname(target)), shlex.quote(target)
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "job.tar.gz"
            with tarfile.open(archive, "w:gz") as tar:
                tar.add(source, arcname=os.path.basename(target))
            output(self, f"umask 077 && mkdir -p {parent}")
            with self._translated_errors():
                self._tunnel.put(str(archive), f"{target}.tar.gz")
        output(self, f"umask 077 && tar -xzpf {quoted}.tar.gz -C {parent} && rm -f {quoted}.tar.gz")

    @contextlib.contextmanager
    def _translated_errors(self) -> Any:
        where = f"{self._tunnel.user}@{self._tunnel.host}"
        try:
            yield
        except SystemExit as error:  # nemo-run's reaction to a refused login
            raise ConfigError(f"ssh {where} was refused: check host, user and identity of the tunnel.") from error
        except (OSError, EOFError) as error:
            raise RuntimeFault(f"ssh {where} failed: {error}. Jobs that were already submitted continue.") from error


Shell = LocalShell | TunnelShell
"""The machine where jobs are submitted."""


def shell_of(tunnel: Any) -> Shell:
    """The shell of an executor's tunnel."""
    return LocalShell() if tunnel is None or type(tunnel).__name__ == "LocalTunnel" else TunnelShell(tunnel)


def output(shell: Shell, command: str) -> str:
    """The output of a command.

    Raises:
        RuntimeFault: the command failed. The message has its output.
    """
    code, out, err = shell.run(command)
    if code != 0:
        words = " ".join((err or out).split()) or f"exit code {code}"
        raise RuntimeFault(f"`{command.split()[0]}` failed: {words}")
    return out


class RemoteLines:
    """Read the new complete lines of a growing remote file, which need not exist yet."""

    def __init__(self, shell: Shell, path: str) -> None:
        self._shell = shell
        self._path = path
        self._position = 0

    def read(self) -> list[str]:
        command = f"tail -c +{self._position + 1} {shlex.quote(self._path)} 2>/dev/null"
        _, text, _ = self._shell.run(command)
        whole, end, _ = text.rpartition("\n")
        size = len((whole + end).encode())
        if "\ufffd" in whole:  # the shell has replaced bytes that are not UTF-8
            size = int(self._shell.run(f"{command} | head -n {whole.count(end) + 1} | wc -c")[1])
        self._position += size
        return [line.rpartition("\r")[2] for line in whole.split("\n")] if end else []
