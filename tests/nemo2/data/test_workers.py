# SPDX-License-Identifier: Apache-2.0
"""Workers of loaders while their rank saves on a signal."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from nemo2.data.workers import outliving_signals


class Counted(Dataset):
    """Its items are the worker's process id and a number, each of which takes a moment."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, int]:
        signal.sigtimedwait({signal.SIGALRM}, 0.05)
        return os.getpid(), index


def start_with(worker: int) -> None:
    os.environ["STARTED"] = str(worker)


def loader(**settings: Any) -> DataLoader:
    return DataLoader(Counted(), batch_size=None, num_workers=1, **settings)


@pytest.fixture
def thread_pool() -> Iterator[None]:
    """torch's, as of a rank with several threads. torch starts it again in each forked worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], ids=lambda n: n.name
)
def test_a_signal_from_elsewhere_ends_no_worker(number: int, thread_pool: None) -> None:
    """The test process is the rank, so the signal comes from a child of it, as from a torchrun."""
    shielded = outliving_signals(outliving_signals(loader()))
    indices = []
    for pid, index in shielded:
        indices.append(index)
        sender = os.fork()
        if sender == 0:
            os.kill(pid, number)
            os._exit(0)
        os.waitpid(sender, 0)
    assert indices == list(range(6))


def test_a_plain_loader_ends_its_rank_with_an_error() -> None:
    """Why the workers are shielded."""
    with pytest.raises(RuntimeError, match="worker"):
        for pid, _ in loader():
            os.kill(pid, signal.SIGUSR1)


def test_a_worker_ends_by_its_rank_and_starts_as_the_user_says() -> None:
    shielded = outliving_signals(loader(worker_init_fn=start_with))
    iterator: Any = iter(shielded)
    next(iterator)
    worker = iterator._workers[0]
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the rank's own mask is as before"
    started = outliving_signals(loader(worker_init_fn=start_with)).worker_init_fn
    assert started is not None and getattr(started, "then") is start_with  # noqa: B009
