# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe on Slurm, from its job's script to its end."""

import sys
import time
from pathlib import Path
from typing import Any

from nemo2.base.errors import EXIT_PREEMPTED
from nemo2.launch.failure import RankFailure
from nemo2.launch.request import LaunchRequest
from nemo2.launch.result import RunResult, Status
from nemo2.launch.slurm.follow import CONTINUED, follow, run_directory
from nemo2.launch.slurm.script import job_script
from nemo2.launch.slurm.settings import ClusterSettings
from nemo2.launch.slurm.shell import shell_of
from nemo2.launch.slurm.start import prepare, submit


def on_slurm(request: LaunchRequest, settings: ClusterSettings) -> RunResult:
    """Submit a recipe as a job and follow it, or print the job with the reasons of its settings. Ctrl-C leaves the job to
    Slurm."""
    job, secrets = prepare(request, settings)
    if request.dryrun:
        print(job_script(job), end="")
        notes = [*request.reasons, *(f"{key}: in a file of mode 0600" for key in sorted(secrets))]
        if notes:
            print("\n".join(["", "# because", *(f"#   {line}" for line in notes)]))
        return request.result("dryrun")
    started = time.monotonic()
    submission = submit(job, request, settings, secrets=secrets)
    facts: dict[str, Any] = {"log_dir": Path(submission.folder), "jobs": tuple(submission.jobs)}
    print(f"submitted as job {' '.join(submission.jobs)}; its folder: {submission.folder}", flush=True)
    if request.detach:
        return request.result("submitted", **facts)
    shell = shell_of(request.executor.tunnel)
    try:
        ending = follow(submission, shell)
    except KeyboardInterrupt:
        print(f"\nThe run continues. `scancel {' '.join(submission.jobs)}` saves and ends it.", file=sys.stderr)
        raise
    directory = run_directory(shell, submission.folder)
    facts |= {"run_dir": Path(directory) if directory else None, "seconds": time.monotonic() - started}
    if ending.state == "done":
        return request.result("succeeded", **facts)
    if ending.state == CONTINUED:
        print(ending.message, flush=True)
        return request.result("continued", EXIT_PREEMPTED, **facts)
    message = f"{ending.message.rstrip('.')}. Logs of all ranks: {submission.folder}/lives"
    failure = RankFailure(message, rank=ending.rank, exit_code=1, details="", log_dir=Path(submission.folder))
    status: Status = "cancelled" if ending.state == "cancelled" else "failed"
    return request.result(status, 1, failure=failure, **facts)
