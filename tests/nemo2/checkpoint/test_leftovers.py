# SPDX-License-Identifier: Apache-2.0
"""A save that all ranks have written outlives a SIGKILL before its publication; anything less is deleted."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nemo2.base.errors import CheckpointError
from nemo2.checkpoint import directory as directories
from nemo2.checkpoint.directory import (
    Manifest,
    changed,
    finished,
    problems,
    read_manifest,
    temporary_name,
    write_manifest,
)
from nemo2.checkpoint.leftovers import clean_up, locked, publish_if_written, publish_written
from support import small_runs
from support.ranks import RankFailed
from tests.nemo2.checkpoint.test_directory import calls_of, killed_at


def train(log_dir: str, max_steps: int, *callbacks: Any, asynchronous: bool = True) -> Path:
    """A run of two ranks that saves each step, as a recipe starts it."""
    import nemo2 as nl
    from nemo2.llm import api

    keep = small_runs.keep(save_top_k=-1, every_n_train_steps=1)
    parts = small_runs.run_arguments(
        log_dir,
        model=small_runs.build_llama(),
        data=small_runs.TokenData(),
        max_steps=max_steps,
        callbacks=callbacks,
        tensor_model_parallel_size=2,
        ckpt_async_save=asynchronous,
    )
    parts["log"] = nl.NeMoLogger(log_dir=log_dir, name="run", ckpt=keep, tensorboard=None)  # a version for each start
    return Path(api.pretrain(**parts))


def killed(log_dir: str, at: str) -> None:
    """Step 1 is saved, and all ranks are killed: before the save is published, at the last rename of its publication, or
    before rank 1 has written."""
    import lightning.pytorch as pl

    from nemo2.base import ranks
    from nemo2.checkpoint import background, io

    class Killing(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == 1:
                records = 2 if at != "half written" else 1
                while len(list(Path(log_dir).glob("*/*/checkpoints/.unfinished-*/.written-?"))) < records:
                    time.sleep(0.05)
                ranks.gather(None)
                os.kill(os.getpid(), signal.SIGKILL)

    if at in ("proven", "renamed"):
        module, name = {"proven": (io, "publish"), "renamed": (directories, "take_place")}[at]
        with mock.patch.object(module, name, die):
            train(log_dir, 2, asynchronous=False)
    background.Saves.finish = lambda self, *, blocking: False
    if at == "half written" and ranks.rank() == 1:
        background.writer_process = mock.Mock(__file__="/no/such/file")  # its processes never answer
        background.SILENCE_SECONDS = 1e9
    train(log_dir, 2, Killing())


def resumed(log_dir: str) -> list[int]:
    """The steps that a second start trains."""
    import lightning.pytorch as pl

    steps: list[int] = []

    class Steps(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            steps.append(trainer.global_step)

    train(log_dir, 3, Steps())
    return steps


@pytest.mark.parametrize(
    ("at", "steps"),
    [("written", [1, 2]), ("proven", [1, 2]), ("renamed", [1, 2]), ("half written", [0, 1, 2])],
)
def test_a_written_save_is_published_at_the_next_start(run_on_ranks, tmp_path, at, steps):
    with pytest.raises(RankFailed, match=r"-9|SIGKILL"):
        run_on_ranks(killed, 2, str(tmp_path), at, timeout=120.0)
    assert not list(tmp_path.glob("run/*/checkpoints/step=*"))
    assert run_on_ranks(resumed, 2, str(tmp_path), timeout=120.0) == [steps, steps]
    whole = list(tmp_path.glob("run/*/checkpoints/step=*"))
    assert sorted(path.name for path in whole) == ["step=1", "step=2", "step=3"]
    for path in whole:
        manifest = read_manifest(path)
        assert manifest is not None and not any(name.startswith(".") for name in manifest.files)
        assert not problems(path) and not changed(path) and not list(path.glob(".written-*"))


def unpublished(folder: Path, step: int, *, ranks: int = 2, run: str = "one") -> Path:
    """A save of two ranks, of which ``ranks`` have written."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    temporary = temporary_name(folder / f"step={step}")
    (temporary / "weights").mkdir(parents=True)
    shards = [f"__{rank}_0.distcp" for rank in range(2)]
    index = {MetadataIndex(name): _StorageInfo(name, 0, 1) for name in shards}
    torch.save({}, temporary / "weights" / "common.pt")
    (temporary / "weights" / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=index)))
    for rank, name in enumerate(shards[:ranks]):
        (temporary / "weights" / name).write_text(f"{step}")
        digest = hashlib.sha256(f"{step}".encode()).hexdigest()
        (temporary / f".written-{rank}").write_text(json.dumps({name: digest}))
    write_manifest(temporary, Manifest(step=step, consumed_samples=8 * step, layout={"world_size": 2}, run=run))
    return temporary


def test_a_living_runs_save_is_left_alone_and_incomplete_ones_are_deleted(tmp_path):
    whole, half = unpublished(tmp_path, 1), unpublished(tmp_path, 2, ranks=1)
    lost = unpublished(tmp_path, 3)
    (lost / "weights" / "__1_0.distcp").unlink()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from nemo2.checkpoint.lock import DirectoryLock as Lock\n"
         f"Lock({str(tmp_path)!r}).acquire(); print('held', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    assert publish_written(tmp_path) == [] and whole.is_dir()
    holder.communicate()
    assert publish_written(tmp_path) == [tmp_path / "step=1"] and half.is_dir()
    assert not changed(tmp_path / "step=1") and not problems(tmp_path / "step=1")
    assert sorted(clean_up(tmp_path)) == sorted([half, lost])


def test_a_directory_of_another_user_is_left_alone(tmp_path, monkeypatch):
    def forbidden(directory: Path) -> list[Path]:
        raise CheckpointError(f"{directory} cannot be read")

    monkeypatch.setattr("nemo2.checkpoint.leftovers.unfinished", forbidden)
    assert publish_written(tmp_path) == []


def test_of_two_saves_of_one_step_the_later_counts_and_another_runs_checkpoint_stays(tmp_path):
    first, second = unpublished(tmp_path, 1), unpublished(tmp_path, 1)
    (second / "weights" / "later").write_text("")
    os.utime(first / "manifest.json", (1, 1))
    other = unpublished(tmp_path, 1, run="two")
    assert publish_written(tmp_path) == [tmp_path / "step=1", tmp_path / "step=1"]
    [(path, manifest)] = finished(tmp_path)
    assert (path / "weights" / "later").is_file() and manifest.run == "one" and clean_up(tmp_path) != [other]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_any_point_of_the_publication_is_made_up_for(tmp_path):
    def prepare(folder: Path) -> Any:
        folder.mkdir()
        temporary = unpublished(folder, 1)
        return lambda: publish_if_written(temporary, folder / "step=1")

    calls = calls_of(prepare(tmp_path / "counting"))
    assert calls >= 8 and problems(tmp_path / "counting" / "step=1") == []
    for call in range(calls):
        folder = tmp_path / str(call)
        killed_at(prepare(folder), call)
        clean_up(folder)
        [(path, _)] = finished(folder)
        assert [path.name for path in folder.iterdir()] == ["step=1"] and not problems(path) and not changed(path)
        assert not list(path.glob(".*")), f"killed before change {call}"


def save_one(target: str, *interruptions: Any) -> None:
    """Save a model, outside of a run's directory, once with each interruption and then wholly."""
    from nemo2.checkpoint import io

    def saves(trainer: Any) -> None:
        for interrupt in interruptions:
            with mock.patch.object(io, "write_manifest", interrupt), pytest.raises(KeyboardInterrupt):
                trainer.save_checkpoint(target, weights_only=True)
            assert not list(Path(target).parent.iterdir())
        trainer.save_checkpoint(target, weights_only=True)

    small_runs.fit(small_runs.build_llama(), max_steps=1, inspect=saves)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_beside_no_run_leaves_nothing_for_good_however_it_was_ended(run_on_ranks, tmp_path):
    target, other = tmp_path / "merged", temporary_name(tmp_path / "un-merged")
    with pytest.raises(RankFailed, match=r"-9|SIGKILL"):
        run_on_ranks(save_one, 1, str(target), interrupt, die)
    assert [path.name.startswith(".unfinished-") for path in tmp_path.iterdir()] == [True]
    living = temporary_name(target)
    for path in (living, other):
        path.mkdir()
    (tmp_path / ".replaced-0-merged").mkdir()
    with locked(living):
        run_on_ranks(save_one, 1, str(target))
        assert living.is_dir() and len(list(tmp_path.glob(".replaced-*"))) == 1, "it was replaced by nothing yet"
    run_on_ranks(save_one, 1, str(target))
    assert {path.name for path in tmp_path.iterdir()} == {"merged", other.name}
