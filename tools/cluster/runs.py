# SPDX-License-Identifier: Apache-2.0
"""The cluster's commands, and a small run on it that can be disturbed and judged."""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

SCRIPT = Path(__file__).with_name("cluster.sh")
PATIENCE_SECONDS = 420.0


class Cluster:
    """`cluster.sh` in a folder of its own; up inside ``with``."""

    def __init__(self, *, accounting: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sl", dir="/tmp")
        self.folder = Path(self._folder.name)
        slurm = {"SLURM_TEST_DIR": str(self.folder / "s"), "SLURM_TEST_ACCOUNTING": str(int(accounting))}
        self.env = {**os.environ, **slurm, "SLURM_CONF": str(self.folder / "s" / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        self.script("up")
        return self

    def __exit__(self, *error: object) -> None:
        self.script("down", "--purge")
        self._folder.cleanup()

    def script(self, *arguments: str) -> str:
        return self.run(str(SCRIPT), *arguments)

    def run(self, *command: str, check: bool = True, cwd: Optional[Path] = None) -> str:
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + ("" if check else done.stderr)

    def queue(self) -> list[str]:
        return self.run("squeue", "--noheader", "--format=%i").split()

    def ranks(self) -> list[int]:
        """Ids of processes of ranks on both nodes."""
        found = []
        for name in self.run("ip", "netns", "list").split():
            if name.endswith(("node1", "node2")) and name.startswith("st"):
                found += [
                    int(pid) for pid in self.run("ip", "netns", "pids", name).split() if _is_rank(int(pid), self.folder)
                ]
        return found


class Run:
    """``llama_tiny`` of some steps on the cluster's two nodes, through `nemo2 pretrain` as a user would."""

    def __init__(
        self, cluster: Cluster, name: str, *, steps: int, profile: Mapping[str, Any], tp: int = 1, **command: str
    ) -> None:
        self.cluster, self.name, self.steps = cluster, name, steps
        self.place = cluster.folder / name
        self.place.mkdir()
        fields = {
            "kind": "slurm",
            "partition": "batch",
            "time": "30",
            "grace_seconds": 60,
            "job_dir": str(self.place / "jobs"),
        }
        fields |= {"runs": str(self.place / "runs"), "code": "none", **profile}
        lines = [
            f"{key} = {value if isinstance(value, str) and value[:1] == '{' else json.dumps(value)}"
            for key, value in fields.items()
        ]
        (self.place / "nemo2.toml").write_text("\n".join(["[clusters.here]", *lines]) + "\n")
        changes = [
            f"trainer.max_steps={steps}",
            "optim.lr_scheduler.max_steps=300",
            f"strategy.tensor_model_parallel_size={tp}",
        ]
        changes += [
            "trainer.log_every_n_steps=1",
            "trainer.limit_val_batches=0",
            f"strategy.sequence_parallel={tp > 1}",
        ]
        self.command = [
            sys.executable,
            "-m",
            "nemo2",
            "pretrain",
            "llama_tiny",
            *changes,
            "--name",
            name,
            "--nodes",
            "2",
        ]
        self.command += ["--devices", "1", "--executor", "here", "--detach", "--yes"]
        self.command += [word for key, value in command.items() for word in (f"--{key}", value)]

    def submit(self) -> "Run":
        said = self.cluster.run(*self.command, cwd=self.place)
        found = re.search(r"submitted as job ([\d ]+); its folder: (\S+)", said)
        if found is None:
            raise RuntimeError(f"not submitted: {said}")
        self.jobs, self.folder = found[1].split(), Path(found[2])
        return self

    def wait_for_step(self, step: int) -> None:
        """Until this step is done, and a random moment longer."""
        self._wait(lambda: len(self.steps_told()) > step or not self.cluster.queue())
        time.sleep(random.uniform(0.0, 2.0))

    def wait_for_end(self) -> None:
        """Wait until its jobs have ended, and what they have left to do on the nodes."""
        looks = [True]

        def over() -> bool:
            looks.append(any(job in self.cluster.queue() for job in self.jobs))
            return not any(looks[-5:])

        self._wait(over)

    def state(self) -> str:
        return str(self._told().get("state"))

    def lives(self) -> int:
        return len(self._told().get("lives", []))

    def steps_told(self) -> list[int]:
        return [record["step"] for record in self._metrics()]

    def loss(self) -> float:
        return self._metrics()[-1]["reduced_train_loss"]

    def problems(self, *, state: str = "done", loss: Optional[float] = None, lives: int = 1) -> list[str]:
        """Problems found at the end."""
        found = []
        if self.state() != state:
            found.append(f"state {self.state()}, not {state}: {json.dumps(self._told().get('lives'))}")
        if self.lives() < lives:
            found.append(f"{self.lives()} lives, not {lives}: it was not disturbed")
        if state == "done" and self.steps_told() != list(range(self.steps)):
            found.append(f"steps {self.steps_told()}")
        elif state == "done" and loss is not None and self.loss() != loss:
            found.append(f"loss {self.loss()}, undisturbed {loss}")
        if left := self.cluster.ranks():
            found.append(f"processes are left: {left}")
        # What is refused before it begins has none.
        if state != "failed" and len(directories := [*(self.place / "runs" / self.name).glob("2*")]) != 1:
            found.append(f"run directories: {directories}")
        return found

    def _metrics(self) -> list[dict[str, Any]]:
        from nemo2.run_dir.records import read_metrics

        files = [*(self.place / "runs" / self.name).glob("2*/metrics.jsonl")]
        return read_metrics(files[0]) if files else []

    def _told(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    def _wait(self, over: Any) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not over():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name}: nothing for {PATIENCE_SECONDS:.0f} s; {self.cluster.run('squeue')}")
            time.sleep(0.5)


def _is_rank(pid: int, folder: Path) -> bool:
    """Whether a process is a rank of a cluster in this folder: several clusters may run side by side."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"nemo2.launch.rank" in command and os.fsencode(folder) in command
    except OSError:
        return False
