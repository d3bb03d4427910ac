# SPDX-License-Identifier: Apache-2.0
"""The program of a TrainJob's pod: it runs torchrun over the ranks of this node, and reports the first error as the
pod's termination message.

``python3 -m nemo2.launch.kubeflow.pod CONFIG RECIPE MAIN`` receives the recipe in nemo-run's serialization, the same
recipe as JSON, for the run's directory, and the launching script or "". Kubeflow Trainer sets the variables with nodes,
ranks, this node's number and rank 0's address (``PET_NNODES``, ``PET_NPROC_PER_NODE``, ``PET_NODE_RANK``,
``PET_MASTER_ADDR``, ``PET_MASTER_PORT``), which torchrun reads itself. Kubernetes keeps the termination message with
the pod's state for as long as it knows the pod.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from nemo2.launch.rank import CONFIG, MAIN
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, Fault, read_faults
from nemo2.training.run_dir.records import RECIPE_FILE, RECIPE_VARIABLE

TERMINATION_LOG_VARIABLE = "NEMO2_TERMINATION_LOG"
_TERMINATION_LOG = "/dev/termination-log"
RANK_FILES = (CONFIG, RECIPE_FILE, MAIN)
"""The files in the arguments, in this order."""
_MOST_BYTES = 4000
"""The limit of a termination message. Kubernetes keeps 4096 bytes."""


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this node; torchrun's exit code."""
    with tempfile.TemporaryDirectory(prefix="nemo2-") as temporary:
        folder = Path(temporary)
        for name, text in zip(RANK_FILES, arguments, strict=True):
            if text:
                (folder / name).write_text(text, encoding="utf-8")
        faults = folder / "faults"
        code = _run(folder, {FAULT_DIR_VARIABLE: str(faults), RECIPE_VARIABLE: str(folder / RECIPE_FILE)})
        if code:
            _write_termination_message(next(iter(read_faults(faults)), None), code)
    return code


def read_termination_message(text: Optional[str]) -> Optional[dict[str, Any]]:
    """The fields of a `Fault` from a pod's termination message. None: the message isn't nemo2's."""
    try:
        fault = json.loads(text or "")
    except ValueError:
        return None
    return fault if isinstance(fault, dict) and {"rank", "time", "kind", "message"} <= fault.keys() else None


def _run(folder: Path, variables: dict[str, str]) -> int:
    # The first process of a container has no default handlers: a signal that it does not pass on is lost.
    grace = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "540")
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace}
    command = [sys.executable, "-m", "torch.distributed.run", "--tee", "3", "--log-dir", str(folder / "logs")]
    started = subprocess.Popen([*command, "-m", "nemo2.launch.rank", str(folder)], env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: started.send_signal(number))
    code = started.wait()
    return 128 - code if code < 0 else code


def _write_termination_message(fault: Optional[Fault], code: int) -> None:
    words = {"rank": None, "time": 0.0, "kind": "", "message": f"torchrun ended with exit code {code}"}
    if fault is not None:
        words = asdict(fault)
        print(
            f"rank {fault.rank} failed first on this node: {fault.kind}: {fault.message}", file=sys.stderr, flush=True
        )
    words = {key: words[key] for key in ("rank", "time", "kind", "message")}
    while len(text := json.dumps(words)) > _MOST_BYTES:
        fitting = len(words["message"]) * _MOST_BYTES // len(text)  # JSON writes some characters as six
        words["message"] = words["message"][: fitting - 4] + " ..."
    with contextlib.suppress(OSError):
        Path(os.environ.get(TERMINATION_LOG_VARIABLE, _TERMINATION_LOG)).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
