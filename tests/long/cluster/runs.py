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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

SCRIPT = Path(__file__).with_name("cluster.sh")
PATIENCE_SECONDS = 600.0
"""Without a sign of life of a run, on a machine that others use, too."""
DEVICES, SAVE_EVERY = 1, 5


class Cluster:
    """`cluster.sh` in a folder of its own; up inside ``with``."""

    def __init__(self, *, accounting: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sl", dir="/tmp")
        self.folder = Path(self._folder.name)
        slurm = {"SLURM_TEST_DIR": str(self.folder / "s"), "SLURM_TEST_ACCOUNTING": str(int(accounting))}
        self.env = {**os.environ, **slurm, "SLURM_CONF": str(self.folder / "s" / "slurm.conf")}
        self.env["NEMORUN_HOME"] = str(self.folder / "home")

    def __enter__(self) -> "Cluster":
        self.script("up")
        return self

    def __exit__(self, *error: object) -> None:
        self.script("down", "--purge")
        self._folder.cleanup()

    def script(self, *arguments: str) -> str:
        return self.run(str(SCRIPT), *arguments)

    def run(self, *command: str, check: bool = True, cwd: Optional[Path] = None, **env: str) -> str:
        done = subprocess.run(
            command, env={**self.env, **env}, cwd=cwd, capture_output=True, text=True, timeout=900, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + ("" if check else done.stderr)

    def queue(self) -> list[str]:
        return self.run("squeue", "--noheader", "--format=%i").split()

    def state(self, job: str) -> str:
        return self.run("squeue", "--noheader", f"--jobs={job}", "--format=%T", check=False).strip()

    def hosts(self, job: str) -> list[str]:
        """The nodes of a running job, the one of its script first."""
        listed = self.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
        return self.run("scontrol", "show", "hostnames", listed).split()

    def is_down(self, node: str) -> bool:
        # sinfo calls a node that is down "completing" for as long as its job's end isn't known.
        return re.search(r" State=\S*DOWN", self.run("scontrol", "show", "node", node, "--oneliner")) is not None

    def wait_until_idle(self) -> None:
        self.wait_for(lambda: self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split() != [])
        self.wait_for(lambda: len(set(self.run("sinfo", "-hN", "--states=idle", "-o", "%N").split())) == 2)

    def wait_for(self, over: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not over():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{what}: nothing for {seconds:.0f} s; {self.run('squeue')}{self.run('sinfo', '-N')}"
                )
            time.sleep(0.5)

    def processes(self) -> dict[int, bytes]:
        """Commands of the processes of jobs on both nodes by their ids."""
        found = []
        for name in self.run("ip", "netns", "list").split():
            if not (name.startswith("st") and name.endswith(("node1", "node2"))):
                continue
            found += [int(pid) for pid in self.run("ip", "netns", "pids", name, check=False).split() if pid.isdecimal()]
        commands = {pid: _command(pid) for pid in found}
        return {pid: command for pid, command in commands.items() if command and os.fsencode(self.folder) in command}

    def ranks(self) -> list[int]:
        """Ids of Python's processes that train, without those that have started them."""
        ours = self.processes().items()
        return [
            pid
            for pid, one in ours
            if b"-m\0nemo2.launch.rank" in one
            and b"\0torch.distributed.run" not in one
            and not one.startswith((b"\0bash", b"\0srun"))
        ]

    def batch_script(self) -> int:
        """The process id of the running job's batch script, whose subshells have its command too."""
        found = [pid for pid, one in self.processes().items() if one.rstrip(b"\0").endswith(b"slurm_script")]
        return next(pid for pid in found if _parent(pid) not in found)


class Run:
    """``llama_tiny`` of some steps on the cluster, through `nemo2 pretrain` or `finetune` as a user would."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        steps: int,
        profile: Optional[Mapping[str, Any]] = None,
        tp: int = 1,
        nodes: int = 2,
        devices: int = DEVICES,
        executor: str = "here",
        title: Optional[str] = None,
        changes: Sequence[str] = (),
        verb: str = "pretrain",
        **command: str,
    ) -> None:
        self.cluster, self.name, self.steps = cluster, title or name, steps
        self.place = cluster.folder / name
        self.place.mkdir()
        self.moments: list[str] = []
        self.jobs: list[str] = []
        self.folder = self.place
        self.write_profile({} if profile is None else profile)
        settings = [
            f"trainer.max_steps={steps}",
            "optim.lr_scheduler.max_steps=2000",
            f"strategy.tensor_model_parallel_size={tp}",
            f"strategy.sequence_parallel={tp > 1}",
            "trainer.log_every_n_steps=1",
            "trainer.limit_val_batches=0",
            f"log.ckpt.every_n_train_steps={SAVE_EVERY}",
            *changes,
        ]
        self.command = [sys.executable, "-m", "nemo2", verb, "llama_tiny", *settings, "--name", self.name]
        self.command += ["--nodes", str(nodes), "--devices", str(devices), "--executor", executor, "--yes"]
        self.command += [word for key, value in command.items() for word in (f"--{key}", value)]

    def write_profile(self, profile: Mapping[str, Any]) -> None:
        fields = {"kind": "slurm", "partition": "batch", "time": "60", "grace_seconds": 60}
        fields |= {"job_dir": str(self.place / "jobs"), "runs": str(self.place / "runs"), "code": "none", **profile}
        lines = [
            f"{key} = {value if isinstance(value, str) and value[:1] == '{' else json.dumps(value)}"
            for key, value in fields.items()
        ]
        (self.place / "nemo2.toml").write_text("\n".join(["[clusters.here]", *lines]) + "\n")

    def here(self) -> "Run":
        """Run it to its end without Slurm."""
        self.cluster.run(*self.command, f"log.log_dir={self.place / 'runs'}", cwd=self.place)
        return self

    def submit(self) -> "Run":
        said = self.cluster.run(*self.command, "--detach", cwd=self.place)
        found = re.search(r"submitted as job ([\d ]+); its folder: (.+)", said)
        if found is None:
            raise RuntimeError(f"not submitted: {said}")
        self.jobs, self.folder = found[1].split(), Path(found[2])
        return self

    def wait_for_life(self, life: int) -> None:
        self._wait(lambda: (self.folder / "lives" / str(life)).is_dir() or self._over(), f"life {life}")

    def wait_for_moment(self, life: int, *, early: bool = False, within: int = 9, beyond: int = 0) -> None:
        """Until a moment at random in this life: between its first steps after that one, or where ``early``, before them."""
        self.wait_for_life(life)
        if early:
            seconds = random.uniform(0.0, 15.0)
            time.sleep(seconds)
            self.moments.append(f"{seconds:.1f} s after its start")
            return
        wanted = beyond + random.randint(1, within)

        def there() -> bool:
            return self._steps_of(life) > 0 and max(self.logged_steps(), default=0) >= wanted

        self._wait(lambda: there() or self._over(), f"step {wanted} in life {life}")
        time.sleep(random.uniform(0.0, 1.0) * (self.step_seconds() or 0.5))
        self.moments.append(f"after step {(self.logged_steps() or [0])[-1] + 1}")

    def wait_for_checkpoint(self) -> None:
        """Until the first save is complete."""
        self._wait(lambda: bool(self.checkpoints()) or self._over(), "a checkpoint")

    def checkpoints(self) -> list[Path]:
        return [*(self.place / "runs" / self.name).glob("2*/checkpoints/[!.]*/manifest.json")]

    def wait_for_end(self, *, seconds: float = PATIENCE_SECONDS) -> "Run":
        """Wait until its jobs have ended, and what they have left to do on the nodes."""
        looks = [True]

        def over() -> bool:
            looks.append(any(job in self.cluster.queue() for job in self.jobs))
            return not any(looks[-5:])

        self._wait(over, "its end", seconds)
        return self

    def state(self) -> str:
        return str(self._state_file().get("state"))

    def verdicts(self) -> list[dict[str, Any]]:
        return self._state_file().get("lives", [])

    def lives(self) -> int:
        return len([*(self.folder / "lives").glob("*")])

    def ended_by_slurm(self) -> int:
        """Lives that the controller ended late, taking them for those before: it does so to nodes that are back soon."""
        return sum(bool(life.get("ended")) for life in self._state_file().get("lives", []))

    def logged_steps(self) -> list[int]:
        return [record["step"] for record in self._metrics()]

    def curve(self) -> list[float]:
        return [record["reduced_train_loss"] for record in self._metrics()]

    def step_seconds(self) -> Optional[float]:
        return next((record["train_step_timing"] for record in reversed(self._metrics())), None)

    def problems(
        self, *, state: str = "done", curve: Optional[Sequence[float]] = None, lives: Optional[int] = None
    ) -> list[str]:
        """Problems found at the end.

        Args:
            curve: The losses of an undisturbed run, as many as are known.
            lives: The required number of lives. None: any number.
        """
        found = []
        if self.state() != state:
            found.append(f"state {self.state()}, not {state}: {json.dumps(self._state_file().get('lives'))}")
        if lives is not None and self.lives() != lives:
            found.append(f"{self.lives()} lives, not {lives}: {json.dumps(self._state_file().get('lives'))}")
        if state == "done" and self.logged_steps() != list(range(self.steps)):
            found.append(f"steps {self.logged_steps()}")
        elif state == "done" and curve:
            pairs = enumerate(zip(self.curve(), curve, strict=False))
            if differing := [f"step {step}: {own} and {other}" for step, (own, other) in pairs if own != other]:
                found.append(f"losses differ from an undisturbed run's from {differing[0]}")
        if self._left():
            time.sleep(20)
            if left := self._left():
                found.append(f"left on the nodes and in the queue: {left}")
        # What is refused before it begins has none.
        if state != "failed" and len(directories := [*(self.place / "runs" / self.name).glob("2*")]) != 1:
            found.append(f"run directories: {directories}")
        return found

    def _left(self) -> list[str]:
        left = [f"{pid}: {command[:80]!r}" for pid, command in self.cluster.processes().items()]
        return [*left, *(job for job in self.jobs if job in self.cluster.queue())]

    def _over(self) -> bool:
        return not any(job in self.cluster.queue() for job in self.jobs)

    def _steps_of(self, life: int) -> int:
        try:
            text = (self.folder / "lives" / str(life) / "rank-00000.out").read_text()
        except OSError:
            return 0
        return len(re.findall(r"reduced_train_loss", text))

    def _metrics(self) -> list[dict[str, Any]]:
        from nemo2.training.run_dir.records import read_metrics

        files = [*(self.place / "runs" / self.name).glob("2*/metrics.jsonl")]
        return read_metrics(files[0]) if files else []

    def _state_file(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    def _wait(self, over: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        self.cluster.wait_for(over, seconds=seconds, what=f"{self.name}, {what}")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command(pid: int) -> bytes:
    """A process' command, its words after zeros; empty for one that has ended, and for a node's daemon."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return b"" if name == "slurmd" else b"\0" + Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
