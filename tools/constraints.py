# SPDX-License-Identifier: Apache-2.0
"""The exact versions with which the tests last passed: constraints.txt, in pip's format.

    python tools/constraints.py --write .venv-python3.12 .venv-python3.11   from what these environments hold
    python tools/constraints.py --compare .venv-newest                      what an environment holds instead

The first environment stands for its Python and all newer ones, the second for the older ones. A package that CUDA's
build of torch brings is left to torch, which names the exact version itself.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "constraints.txt"
_HEADER = """\
# The versions with which all tests last passed, for `pip install --constraint`. `make setup` installs them.
# Written by: python tools/constraints.py --write NEWEST_ENVIRONMENT OLDEST_ENVIRONMENT
"""
_TORCHS = ("nvidia-", "cuda-", "triton", "nemo2", "pip")


def installed(environment: Path) -> dict[str, str]:
    """The versions of an environment's packages by name, without local labels such as ``+cpu``."""
    command = [str(environment / "bin" / "python"), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    names = {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"].partition("+")[0] for item in packages}
    return {name: version for name, version in sorted(names.items()) if not name.startswith(_TORCHS)}


def python_of(environment: Path) -> str:
    """The minor version of an environment's Python, such as ``3.12``."""
    command = [str(environment / "bin" / "python"), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def lines(newest: dict[str, str], oldest: dict[str, str], boundary: str) -> list[str]:
    """A line for each package, two where the stacks differ: at ``boundary`` and newer Pythons, and below."""
    result = []
    for name in sorted(newest | oldest):
        at_new, at_old = newest.get(name), oldest.get(name)
        if at_new == at_old or at_old is None or at_new is None:
            result.append(f"{name}=={at_new or at_old}")
        else:
            result.append(f'{name}=={at_new}; python_version >= "{boundary}"')
            result.append(f'{name}=={at_old}; python_version < "{boundary}"')
    return result


def requirement(name: str, text: str, python: tuple[int, int]) -> str:
    """The constraint on a package for this Python as a requirement; the bare name where there is none.

    Reads what `lines` writes with nothing but the standard library, because it runs before anything is installed.
    """
    for line in text.splitlines():
        pin, _, marker = line.partition(";")
        if pin.partition("==")[0] != name:
            continue
        comparison = re.fullmatch(r'\s*python_version (>=|<) "(\d+)\.(\d+)"', marker)
        if comparison is None:
            return pin.strip()
        boundary = (int(comparison[2]), int(comparison[3]))
        if (python >= boundary) == (comparison[1] == ">="):
            return pin.strip()
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", nargs=2, type=Path, metavar=("NEWEST", "OLDEST"))
    group.add_argument("--compare", type=Path, metavar="ENVIRONMENT")
    group.add_argument("--requirement", nargs=2, metavar=("NAME", "FILE"))
    arguments = parser.parse_args()
    if arguments.write:
        newest, oldest = arguments.write
        FILE.write_text(_HEADER + "\n".join(lines(installed(newest), installed(oldest), python_of(newest))) + "\n")
    elif arguments.compare:
        major, minor = map(int, python_of(arguments.compare).split("."))
        text = FILE.read_text()
        for name, version in installed(arguments.compare).items():
            pin = requirement(name, text, (major, minor)).partition("==")[2]
            if version != pin:
                print(f"{name} {version}, tried: {pin or 'never'}")
    else:
        name, file = arguments.requirement
        print(requirement(name, Path(file).read_text(), sys.version_info[:2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
