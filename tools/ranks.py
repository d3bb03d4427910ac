# SPDX-License-Identifier: Apache-2.0
"""Functions on gloo ranks for the commands in this folder: forked from this process, which has imported everything once.

A rank starts in milliseconds this way. The parent must not have started threads or process groups.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class RankFailed(Exception):
    """A rank raised, died or did not answer in time."""


def prepare() -> None:
    """Environment and imports; before anything of torch is used."""
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }.items():
        os.environ.setdefault(name, value)
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    from nemo2.backend import get_backend

    get_backend().install()
    import lightning.pytorch  # noqa: F401
    import megatron.core.dist_checkpointing  # noqa: F401
    import torch._dynamo  # torch imports it when the first optimizer is made, which costs a second and more per rank
    import torch.distributed.fsdp

    import nemo2.checkpoint.model_checkpoint
    import nemo2.models.llama
    import nemo2.optim.megatron
    import nemo2.strategies.fsdp
    import nemo2.strategies.fsdp2
    import nemo2.strategy
    import nemo2.trainer  # noqa: F401

    for name in ("lightning.pytorch", "lightning.fabric", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _log_once()


def _log_once() -> None:
    """Half of what a rank of a short run spends is Lightning's first `log`: it asks of class after class whether it is a
    torchmetrics ``Metric``, and Python asks all of the 250 kinds of metric in turn. Ranks inherit the answers.

    Validation only: a process that has run a backward pass may not be forked.
    """
    import lightning.pytorch as pl
    import torch

    class OneMetric(pl.LightningModule):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("metric", batch.sum())

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(OneMetric(), torch.utils.data.DataLoader(torch.zeros(1, 1)), verbose=False)  # pyright: ignore[reportArgumentType]


def run(function: Callable[..., Any], world: int, *args: Any, timeout: float = 180.0, quiet: bool = True) -> list[Any]:
    """``function(*args)`` on ``world`` ranks of one process group; what each returned, in order of rank.

    Raises:
        RankFailed: with the traceback of the rank that failed first, or who did not answer within ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, world, function, args, folder, timeout, quiet) for rank in range(world)]
        left, deadline = dict(enumerate(pids)), time.monotonic() + timeout
        try:
            while left and time.monotonic() < deadline and not _failed(folder, world):
                for rank, pid in list(left.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        del left[rank]
                        if not (Path(folder) / f"answer{rank}").exists():
                            code = os.waitstatus_to_exitcode(status)
                            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                            raise RankFailed(f"rank {rank} ended {how}, without an answer{_stacks(folder, rank)}")
                time.sleep(0.01)
        finally:
            for pid in left.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        answers = [_answer(folder, rank) for rank in range(world)]
        if errors := [answer for answer in answers if answer is not None and answer[1] == "error"]:
            raise RankFailed(min(errors)[2])
        if None in answers:
            rank = answers.index(None)
            raise RankFailed(f"no answer within {timeout:.0f} s from rank {rank}{_stacks(folder, rank)}")
        return [answer[2] for answer in answers if answer is not None]


def _fork(
    rank: int, world: int, function: Callable[..., Any], args: tuple, folder: str, timeout: float, quiet: bool
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    stacks = open(f"{folder}/stacks{rank}", "w")  # noqa: SIM115 # stays open for as long as this process lives
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(max(1.0, timeout - 2.0), file=stacks)
    try:
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(f"{folder}/errors{rank}", os.O_WRONLY | os.O_CREAT), 2)
        answer = (time.time(), "result", _call(rank, world, function, args, folder, timeout))
    except BaseException:
        answer = (time.time(), "error", f"rank {rank}: {traceback.format_exc()}")
    path = Path(folder) / f"answer{rank}"
    path.with_suffix(".part").write_bytes(pickle.dumps(answer))
    path.with_suffix(".part").rename(path)
    os._exit(0)


def _call(rank: int, world: int, function: Callable[..., Any], args: tuple, folder: str, timeout: float) -> Any:
    from datetime import timedelta

    import torch

    # A fork leaves torch's thread pool behind, to be made anew by whoever asks for it first. Where two threads do, as a backward
    # pass does, one of them finds none and ends the process ("Invalid thread pool!"). Here one thread asks.
    torch.set_num_threads(torch.get_num_threads())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in (own | {"GROUP_RANK": 0}).items()})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    result = function(*args)
    torch.distributed.barrier()
    return result


def _stacks(folder: str, rank: int) -> str:
    """Where a rank was when it crashed, or when its time was nearly over, and the last that was written to its stderr."""
    written = [
        path.read_text()[-4000:] for name in ("errors", "stacks") if (path := Path(folder) / f"{name}{rank}").exists()
    ]
    return "".join(f"\n{text}" for text in written if text)


def _answer(folder: str, rank: int) -> tuple[Any, ...] | None:
    path = Path(folder) / f"answer{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _failed(folder: str, world: int) -> bool:
    answers = (_answer(folder, rank) for rank in range(world))
    return any(answer is not None and answer[1] == "error" for answer in answers)
