# SPDX-License-Identifier: Apache-2.0
"""Commands in forks of a warm process end, hear signals and see their surroundings as fresh ones do."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.waiting import wait_for_end


@pytest.fixture
def shell(warm_commands, tmp_path):
    def run(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **warm_commands, **variables}
        return subprocess.run(
            ["bash", "-c", line],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            input="given",
        )

    return run


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "python script.py"


def test_arguments_streams_variables_and_the_folder_arrive_and_the_exit_code_comes_back(shell, tmp_path):
    command = script(
        tmp_path,
        "import os, sys\nprint(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ['OWN'], __name__)\n"
        "print('wrong', file=sys.stderr)\nsys.exit(7)\n",
    )
    done = shell(f"{command} 'a b' c", OWN="x")
    assert done.returncode == 7 and done.stderr == "wrong\n"
    assert done.stdout == f"['a b', 'c'] given {tmp_path} x __main__\n"


def test_it_is_warm_and_knows_nothing_of_the_command_before(shell, tmp_path):
    command = script(
        tmp_path, "import sys, torch\nprint('nemo2' in sys.modules, hasattr(torch, 'own'))\ntorch.own = 1\n"
    )
    assert shell(command).stdout == shell(command).stdout == "True False\n"
    assert shell("python -c \"import sys; print('torch' in sys.modules)\"").stdout == "False\n"


def test_an_error_is_a_traceback_and_1(shell, tmp_path):
    done = shell(script(tmp_path, "raise ValueError('no')\n"))
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: no")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 130)])
def test_a_signal_reaches_it_and_a_killed_command_takes_its_fork_along(shell, warm_commands, tmp_path, number, code):
    # Naps: a signal between the interpreter's last look and the start of a sleep waits for its end.
    script(
        tmp_path,
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print(os.getpid(), flush=True)\nfor _ in range(600):\n    time.sleep(0.1)\n",
    )
    environment = {**os.environ, **warm_commands}
    for sent, expected in ((number, code), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(
            ["python", "script.py"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        process.send_signal(sent)
        assert process.wait(30) == expected
        process.stdout.close()
        wait_for_end(fork)


def test_it_ends_by_the_signal_that_ended_its_fork_and_what_it_printed_has_arrived_where_a_variable_asks(
    shell, tmp_path
):
    killed = script(tmp_path, "import os, signal\nprint('said')\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = shell(f"exec {killed}", PYTHONUNBUFFERED="x")
    assert (done.returncode, done.stdout) == (-9, "said\n")
