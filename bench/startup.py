# SPDX-License-Identifier: Apache-2.0
"""Seconds before a command does anything: whole commands, and beside them their imports alone.

    python bench/startup.py                      # medians of 5 runs each, wall and CPU seconds

The commands take turns with their baselines, so that a slow minute of the machine touches both.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nemo2.columns import columns

BIN = Path(sys.executable).parent
PYTHON = [sys.executable, "-c"]
IMPORTS = "import torch, nemo_run, lightning.pytorch"
COMMANDS: dict[str, tuple[list[str], float]] = {
    # name: (command, the seconds it may take)
    "import nemo2": ([*PYTHON, "import nemo2"], 0.3),
    "nemo2 list": ([str(BIN / "nemo2"), "list"], 0.6),
    "nemo2 --help": ([str(BIN / "nemo2"), "--help"], 0.6),
    "nemo2 show llama3_8b": ([str(BIN / "nemo2"), "show", "llama3_8b"], 4.0),
    "nemo2 check llama3_8b": ([str(BIN / "nemo2"), "check", "llama3_8b"], 4.0),
    "nemo2 explain llama3_8b": ([str(BIN / "nemo2"), "explain", "llama3_8b"], 6.0),
}
HEAVY, MEGATRON = "torch, nemo-run, Lightning", "torch, nemo-run, Lightning, Megatron-Core"
BASELINES = {
    "python": [*PYTHON, "pass"],
    HEAVY: [*PYTHON, IMPORTS],
    MEGATRON: [*PYTHON, f"{IMPORTS}, megatron.core, megatron.core.models.gpt"],
}
NO_TORCH = ("import nemo2", "nemo2 list", "nemo2 --help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_args()
    commands = {name: command for name, (command, _) in COMMANDS.items()} | BASELINES
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(arguments.runs + 1):
        for name, command in commands.items():
            seconds[name].append(timed(command))
    rows = []
    # The first run warmed the page cache.
    medians = {name: [statistics.median(times) for times in zip(*seconds[name][1:], strict=True)] for name in commands}
    for name, (wall, cpu) in medians.items():
        limit = COMMANDS[name][1] if name in COMMANDS else None
        # CPU seconds: on a busy machine the wall clock tells of the others.
        rows.append(
            {"command": name, "wall_s": wall, "cpu_s": cpu, "limit_s": limit, "of_imports": cpu / medians[HEAVY][1]}
        )
    cells = [[f"{value:.2f}" if isinstance(value, float) else value or "" for value in row.values()] for row in rows]
    head = ("command", "wall s", "CPU s", "may take", "CPU of imports")
    print("\n".join(columns(cells, head=head, right=range(1, 5))))
    for name in NO_TORCH:
        print(f"{name}: torch is {'' if imports_torch(name) else 'not '}imported")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command as a whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(name: str) -> bool:
    """Whether a command imports torch, by what Python itself says of its imports."""
    command: list[Any] = COMMANDS[name][0]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    )
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


if __name__ == "__main__":
    main()
