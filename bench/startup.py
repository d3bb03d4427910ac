# SPDX-License-Identifier: Apache-2.0
"""Seconds before a command answers: whole commands, a TAB, the first output on a terminal, and imports alone.

    python bench/startup.py                      # medians of 5 runs each, wall and CPU seconds

The commands take turns with the imports they are compared with, so that a slow minute of the machine touches both.
"""

import argparse
import json
import os
import pty
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nemo2.base.columns import columns

BIN = Path(sys.executable).parent
NEMO2 = str(BIN / "nemo2")
PYTHON = [sys.executable, "-c"]
IMPORTS = "import torch, nemo_run, lightning.pytorch"
TAB = """
COMP_WORDS=(nemo2 pretrain llama3_8b trainer.max_s) COMP_CWORD=3
COMP_LINE="${COMP_WORDS[*]}" COMP_POINT=${#COMP_LINE}
_nemo2
[[ " ${COMPREPLY[*]} " == *trainer.max_steps* ]]
"""
COMMANDS: dict[str, tuple[list[str], float]] = {
    # name: (command, the seconds it may take on a machine where the imports of HEAVY take 3.8)
    "import nemo2": ([*PYTHON, "import nemo2"], 0.3),
    "nemo2 list": ([NEMO2, "list"], 0.3),
    "nemo2 --help": ([NEMO2, "--help"], 0.3),
    "TAB after trainer.max_s": (["bash", "-c", TAB], 0.3),
    "nemo2 show llama3_8b": ([NEMO2, "show", "llama3_8b"], 4.0),
    "nemo2 check llama3_8b": ([NEMO2, "check", "llama3_8b"], 4.0),
    "nemo2 show llama3_8b --explain all": ([NEMO2, "show", "llama3_8b", "--explain", "all"], 6.0),
}
FIRST_OUTPUT: dict[str, tuple[list[str], float]] = {
    f"first output of {' '.join(words)}": ([NEMO2, *words], 1.0)
    for words in (["show", "llama3_8b"], ["check", "llama3_8b"], ["rehearse", "llama_tiny"], ["pretrain", "llama_tiny"])
}
TORCH, HEAVY = "import torch", "import torch, nemo-run, Lightning"
MEGATRON = f"{HEAVY}, Megatron-Core"
BASELINES = {
    "python": [*PYTHON, "pass"],
    TORCH: [*PYTHON, TORCH],
    HEAVY: [*PYTHON, IMPORTS],
    MEGATRON: [*PYTHON, f"{IMPORTS}, megatron.core, megatron.core.models.gpt"],
}
NO_TORCH = ("import nemo2", "nemo2 list", "nemo2 --help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_args()
    prepare_completion()
    limits = {name: limit for name, (_, limit) in (COMMANDS | FIRST_OUTPUT).items()}
    commands = {name: command for name, (command, _) in (COMMANDS | FIRST_OUTPUT).items()} | BASELINES
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(arguments.runs + 1):
        for name, command in commands.items():
            seconds[name].append(until_first_output(command) if name in FIRST_OUTPUT else whole(command))
    # The first run warmed the page cache.
    medians = {name: [statistics.median(times) for times in zip(*seconds[name][1:], strict=True)] for name in commands}
    rows = [
        {
            "command": name,
            "wall_s": wall,
            "cpu_s": cpu,
            "limit_s": limits.get(name),
            "of_import_torch": wall / medians[TORCH][0],
            "of_imports": wall / medians[HEAVY][0],
        }
        for name, (wall, cpu) in medians.items()
    ]
    cells = [[f"{value:.2f}" if isinstance(value, float) else value or "" for value in row.values()] for row in rows]
    head = ("command", "wall s", "CPU s", "limit s", "of torch", "of three imports")
    print("\n".join(columns(cells, head=head, right=range(1, 6))))
    for name in NO_TORCH:
        print(f"{name}: torch is {'' if imports_torch(name) else 'not '}imported")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def prepare_completion() -> None:
    """Put the function that bash calls at each TAB into the command, as a shell's start would."""
    script = subprocess.run([NEMO2, "completion", "bash"], check=True, capture_output=True, text=True).stdout
    command, limit = COMMANDS["TAB after trainer.max_s"]
    COMMANDS["TAB after trainer.max_s"] = ([*command[:2], script + command[2]], limit)
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"


def whole(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command as a whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started, cpu_seconds_since(before)


def until_first_output(command: list[str]) -> tuple[float, float]:
    """Wall seconds until a command has written its first bytes to a terminal, and the CPU seconds until it is stopped."""
    terminal, end = pty.openpty()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    os.read(terminal, 1)
    wall = time.perf_counter() - started
    process.kill()
    process.wait()
    os.close(terminal)
    return wall, cpu_seconds_since(before)


def cpu_seconds_since(before: resource.struct_rusage) -> float:
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(name: str) -> bool:
    """Whether a command imports torch, by what Python itself says of its imports."""
    command: list[Any] = COMMANDS[name][0]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    )
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


if __name__ == "__main__":
    main()
