# SPDX-License-Identifier: Apache-2.0
"""The last step of an image's build: ``python check.py BEFORE``, which fails the build where the image would fail a job.

BEFORE is a list of ``name==version`` of what must not have changed. Without a GPU, as builds are, everything is looked at but
kernels: `nemo2 cluster test` looks at the rest on the nodes.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def main(before: Path) -> int:
    wrong = [*replaced(before), *out_of_range()]
    for command in (["list"], ["check", "llama3_8b", "--gpus", "H100x8"]):
        ended = subprocess.run([sys.executable, "-m", "nemo2", *command], capture_output=True, text=True, check=False)
        if ended.returncode:
            wrong.append(f"nemo2 {' '.join(command)} fails:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    print("\n".join(wrong) or "nemo2 and what it stands on fit each other")
    return 1 if wrong else 0


def replaced(before: Path) -> list[str]:
    """What is of another version than ``before`` says, or gone."""
    found: list[str] = []
    for line in before.read_text(encoding="utf-8").split():
        name, _, was = line.partition("==")
        now = _installed(name)
        if now is None or Version(now) != Version(was):
            found.append(f"{name} was {was} and is {now or 'gone'}: the base image's own build has to stay")
    return found


def out_of_range() -> list[str]:
    """What nemo2 asks for and is there in another version; of Transformer Engine's names any counts."""
    found: list[str] = []
    for text in requires("nemo2") or []:
        wanted = Requirement(text)
        extra = wanted.marker is not None and "extra" in str(wanted.marker)
        if extra and "te" not in str(wanted.marker):
            continue
        now = _installed(wanted.name)
        if now is None and not extra:
            found.append(f"{wanted.name} is missing")
        # A build of NVIDIA's counts as the release that it comes before.
        elif now is not None and not wanted.specifier.contains(Version(now).base_version, prereleases=True):
            found.append(f"{wanted.name} {now} is not {wanted.specifier}")
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
