# SPDX-License-Identifier: Apache-2.0
"""The command that the drill runs again and again: a small Llama on gloo ranks, with `llm.pretrain` and all it brings.

A rank is forked from a process that has imported everything, so that a run costs a second. What disturbs a run is in
`faults.py`; without it every run of the same directory is the same command.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS, EVERY = 12, 3
GRACE_SECONDS = 15.0


@dataclass
class Ended:
    """The end of a run: exit codes by rank (negative: a signal), the ranks' output, and the duration."""

    codes: list[int]
    said: str
    seconds: float

    @property
    def done(self) -> bool:
        return all(code == 0 for code in self.codes)


@dataclass
class Run:
    """The settings of one run. A rerun differs only in ``fault``."""

    directory: Path
    world: int = 2
    asynchronous: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    hang_seconds: float = 60.0
    max_seconds: float | None = None
    """``trainer.max_time``."""
    corpus: Path | None = None
    """The prefix of token files to train on. None: tokens in memory."""
    resumes: bool = True
    max_steps: int = STEPS
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the trainer."""
    logs: dict[str, float] = field(default_factory=dict)
    """Metrics that every step logs."""
    tuning: dict[str, str] | None = None
    """The options of `tuned_runs.finetune`. None: pre-training."""

    def start(self, fault: Callable[[], None] | None = None) -> "Ranks":
        return Ranks(self, fault)

    def __call__(self, fault: Callable[[], None] | None = None, timeout: float = 150.0) -> Ended:
        """Run to the end. ``fault`` is called on every rank before anything else, and may prepare something."""
        return self.start(fault).wait(timeout)


class Ranks:
    """The ranks of a run that is under way."""

    def __init__(self, run: Run, fault: Callable[[], None] | None) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.output = run.directory / f"output-{time.time_ns()}"
        sys.stdout.flush()
        self.pids = [self._fork(run, rank, fault) for rank in range(run.world)]
        self.codes: dict[int, int] = {}

    def wait(self, timeout: float = 150.0) -> Ended:
        """Wait as torchrun does: once one rank has failed, the others are asked to end, and then made to."""
        asked = None
        while len(self.codes) < len(self.pids):
            self.poll()
            now = time.monotonic()
            if asked is None and any(self.codes.values()):
                asked = now
                self._send(signal.SIGTERM)
            if (asked is not None and now > asked + GRACE_SECONDS) or now > self.started + timeout:
                self._send(signal.SIGKILL)
                self._send(signal.SIGCONT)
            time.sleep(0.01)
        said = self.output.read_text(errors="replace") if self.output.exists() else ""
        codes = [self.codes[rank] for rank in range(len(self.pids))]
        return Ended(codes, said, time.monotonic() - self.started)

    def poll(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _send(self, number: int) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, number)

    def _fork(self, run: Run, rank: int, fault: Callable[[], None] | None) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            descriptor = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            self._be_rank(run, rank, fault)
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _be_rank(self, run: Run, rank: int, fault: Callable[[], None] | None) -> None:
        import torch

        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.world, "LOCAL_WORLD_SIZE": run.world}
        os.environ.update({name: str(value) for name, value in own.items()} | {"NODE_RANK": "0", "GROUP_RANK": "0"})
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{self.output}.store",
            rank=rank,
            world_size=run.world,
            timeout=timedelta(seconds=60),
        )
        if fault is not None:
            fault()
        train(run)


def train(run: Run) -> None:
    """The command itself, on each rank."""
    from lightning.pytorch.callbacks import Callback

    from nemo2.checkpoint.auto_resume import AutoResume
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.data.tokenizer import NullTokenizer
    from nemo2.llm.api import pretrain
    from nemo2.training.run_dir.hang import HangWatchdog
    from nemo2.training.run_dir.logger import NeMoLogger
    from support import small_corpora, small_runs, tuned_runs

    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            for name, value in run.logs.items():
                pl_module.log(name, value, batch_size=1)

    model = small_runs.build_llama(schedule=small_runs.cosine(STEPS), hidden_dropout=0.1, attention_dropout=0.1)
    trainer = small_runs.build_trainer(
        max_steps=run.max_steps,
        ckpt_async_save=run.asynchronous,
        callbacks=[HangWatchdog(run.hang_seconds), Logs()],
        trainer=run.trainer | ({"max_time": timedelta(seconds=run.max_seconds)} if run.max_seconds is not None else {}),
        **{"tensor_model_parallel_size": run.world, **run.strategy},
    )
    if run.tuning is not None:
        tuned_runs.finetune(run.directory / "run", trainer=trainer, every=EVERY, keep=2, **run.tuning)
        return
    data: Any = small_runs.TokenData(size=128)
    if run.corpus is not None:
        data = small_corpora.module(
            str(run.corpus),
            tokenizer=NullTokenizer(small_runs.VOCAB - 1),
            global_batch_size=8,
            split="1,0,0",
            index_mapping_dir=str(run.directory / "index"),
        )
    pretrain(
        model=model,
        data=data,
        trainer=trainer,
        log=NeMoLogger(
            explicit_log_dir=str(run.directory / "run"),
            ckpt=ModelCheckpoint(
                monitor=None, every_n_train_steps=EVERY, save_top_k=2, filename="{step}", save_optim_on_train_end=True
            ),
        ),
        resume=AutoResume(resume_if_exists=run.resumes, resume_ignore_no_checkpoint=True),
    )


def curve(run: Run) -> dict[int, str]:
    """The exact loss of every step in ``metrics.jsonl``. A step that occurs twice is reported."""
    import json

    losses: dict[int, str] = {}
    file = run.directory / "run" / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        if "reduced_train_loss" in record:
            losses[record["step"]] = "twice" if record["step"] in losses else repr(record["reduced_train_loss"])
    return losses


def checkpoints(run: Run) -> dict[int, Path]:
    """The finished checkpoints of a run by step."""
    from nemo2.checkpoint.directory import finished

    return {manifest.step: path for path, manifest in finished(run.directory / "run" / "checkpoints")}
