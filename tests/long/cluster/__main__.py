# SPDX-License-Identifier: Apache-2.0
"""Runs on a real Slurm of two nodes, disturbed in every way that jobs are:
``python -m tests.long.cluster [--only CASE] [--times N]``.

Needs root and Debian's packages (``cluster.sh packages``). Each disturbed run has to be done by itself, with the
losses of an undisturbed one on this machine without Slurm, no step twice, one run directory, and nothing left in the queue or on
a node. ``--times 3`` disturbs each run three times, at other moments.
"""

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence

from tests.long.cluster.cases import CASES, DEFAULT, Curves
from tests.long.cluster.runs import Cluster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=[*CASES], metavar="CASE", help=f"Of {', '.join(CASES)}.")
    parser.add_argument("--all", action="store_true", help="Those that take longer, too: half an hour or more.")
    parser.add_argument("--times", type=int, default=1, help="How often each run is disturbed.")
    given = parser.parse_args()
    # What this process has of another Slurm is no business of this cluster.
    for name in [name for name in os.environ if re.match(r"SLURM_|SBATCH_|SRUN_", name)]:
        del os.environ[name]
    return run(given.only or (list(CASES) if given.all else list(DEFAULT)), times=given.times)


def run(names: Sequence[str], *, times: int) -> int:
    failed = 0
    began = time.monotonic()
    with Cluster() as cluster:
        curves = Curves(cluster)
        for name in names:
            started = time.monotonic()
            told: list[str] = []
            try:
                problems = CASES[name](cluster, curves, times, told)
            except Exception:
                problems = [traceback.format_exc(limit=3)]
            failed += bool(problems)
            seconds = time.monotonic() - started
            print(f"{name:20} {'FAILED' if problems else 'ok'} {seconds:6.0f} s  {'; '.join(told)}", flush=True)
            for problem in problems:
                print(f"    {problem}", flush=True)
            for job in cluster.queue():
                cluster.run("scancel", job, check=False)
    print(f"{time.monotonic() - began:.0f} s in all, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
