# SPDX-License-Identifier: Apache-2.0
"""Run a command with pretend GPUs: `python -m support.pretend_gpu --gpus 2 COMMAND...`."""

import argparse
import os
import shutil

from support.pretend_gpu import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    program = shutil.which(arguments.command[0])
    if program is None:
        raise SystemExit(f"there is no program {arguments.command[0]}")
    os.execve(program, arguments.command, environment(gpus=arguments.gpus))


if __name__ == "__main__":
    main()
