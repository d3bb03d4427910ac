# SPDX-License-Identifier: Apache-2.0
"""Training that goes on from a checkpoint: the same training, on the same ranks bit by bit; the same model, in any layout."""

import functools
import os
import re
import resource
import shutil
import time
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from packaging.version import Version

import nemo2 as nl
from nemo2.base.errors import CheckpointError, SaveFailed
from nemo2.checkpoint import directory as files
from nemo2.checkpoint import io, loading, random_state, reading, writing
from support import small_runs

STEPS, STOP = 6, 3
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def keeping(directory: str | Path, **options: Any) -> Any:
    given = {"every_n_train_steps": STOP, "save_top_k": -1, "filename": "{step}", "save_last": False}
    return nl.ModelCheckpoint(dirpath=str(directory), verbose=False, save_optim_on_train_end=True, **given | options)


def llama(**config: Any) -> Any:
    return small_runs.build_llama(schedule=small_runs.cosine(STEPS), **DROPOUT | config)


def run(*, max_steps: int = STEPS, callbacks: Any = (), ckpt_path: Any = None, **strategy: Any) -> dict[str, Any]:
    return small_runs.fit(
        llama(),
        max_steps=max_steps,
        callbacks=callbacks,
        ckpt_path=ckpt_path,
        inspect=lambda trainer: {
            "digest": sum(float(value.double().abs().sum()) for value in small_runs.parameters(trainer).values())
        },
        # A validation right after the save: the resumed run doesn't repeat it.
        trainer={"limit_val_batches": 1, "val_check_interval": STOP, "check_val_every_n_epoch": None},
        **LAYOUT | strategy,
    )


def interrupted_and_resumed(directory: str) -> dict[str, dict[str, Any]]:
    runs = {"uninterrupted": run()}
    runs["saving in the background"] = run(callbacks=[keeping(f"{directory}/async")], ckpt_async_save=True)
    runs["resumed from the background save"] = run(ckpt_path=f"{directory}/async/step={STOP}")
    runs["stopped"] = run(max_steps=STOP, callbacks=[keeping(f"{directory}/sync")])
    runs["resumed"] = run(ckpt_path=f"{directory}/sync/step={STOP}")
    with mock.patch.object(random_state, "load_random_state"):
        runs["without random state"] = run(ckpt_path=f"{directory}/sync/step={STOP}")
    runs["without optimizer state"] = run(ckpt_path=f"{directory}/sync/step={STOP}", ckpt_load_optimizer=False)
    return runs


@pytest.fixture(scope="module")
def runs(run_on_ranks, tmp_path_factory) -> dict[str, dict[str, Any]]:
    ranks = run_on_ranks(interrupted_and_resumed, 2, str(tmp_path_factory.mktemp("resume")))
    for name, first in ranks[0].items():
        assert first["losses"] == ranks[1][name]["losses"], "every rank reports the same loss"
    return ranks[0]


def test_saving_does_not_disturb_training(runs):
    reference, saving = runs["uninterrupted"], runs["saving in the background"]
    assert len(set(reference["losses"])) == STEPS
    assert saving["losses"] == reference["losses"]
    assert saving["val_losses"] == reference["val_losses"]
    assert saving["inspected"] == reference["inspected"]


@pytest.mark.parametrize("name", ["resumed", "resumed from the background save"])
def test_a_resumed_run_continues_bit_by_bit_with_dropout(runs, name):
    reference, resumed = runs["uninterrupted"], runs[name]
    assert resumed["losses"] == reference["losses"][STOP:]
    assert resumed["grad_norms"] == reference["grad_norms"][STOP:]
    assert resumed["rates"] == reference["rates"][STOP:]
    assert resumed["inspected"] == reference["inspected"]


def test_no_sample_is_repeated_or_skipped(runs):
    whole = runs["uninterrupted"]
    assert [i for step in whole["samples"] for i in step] == list(range(STEPS * small_runs.GBS))
    assert runs["stopped"]["samples"] + runs["resumed"]["samples"] == whole["samples"]
    assert runs["stopped"]["consumed"] + runs["resumed"]["consumed"] == whole["consumed"]
    assert whole["consumed"] == [small_runs.GBS * (step + 1) for step in range(STEPS)]


@pytest.mark.parametrize("dropped", ["without random state", "without optimizer state"])
def test_the_comparison_notices_what_is_dropped(runs, dropped):
    assert runs[dropped]["samples"] == runs["resumed"]["samples"]
    assert runs[dropped]["losses"] != runs["resumed"]["losses"]


# ---------------------------------------------------------------------------------------------------- another layout


def saved_with_logits(directory: str, tensor: int) -> list[float]:
    """Trains two steps and saves; returns the loss of a batch under the weights saved."""
    small_runs.quiet()
    seen: list[float] = []
    small_runs.fit(
        small_runs.build_llama(distributed=tensor == 1),
        max_steps=2,
        callbacks=[keeping(directory)],
        tensor_model_parallel_size=tensor,
        inspect=lambda trainer: seen.extend(per_token_losses(trainer.lightning_module)),
    )
    return seen


def loaded_logits(path: str, **strategy: Any) -> list[float]:
    """The same from a checkpoint, in the layout given, as validation loads it."""
    small_runs.quiet()
    model = small_runs.build_llama()
    trainer = small_runs.build_trainer(max_steps=1, trainer={"limit_val_batches": 1}, **strategy)
    trainer.validate(model, small_runs.TokenData(), ckpt_path=path, verbose=False)
    return per_token_losses(model)


def per_token_losses(model: Any) -> list[float]:
    batch = small_runs.on_device(small_runs.global_batch(5))
    model.eval()
    with torch.no_grad():
        losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    return losses.flatten().tolist()


def test_a_checkpoint_of_two_tensor_parallel_ranks_is_the_same_model_in_one_process(run_on_ranks, tmp_path):
    saved = run_on_ranks(saved_with_logits, 2, str(tmp_path), 2)[0]
    loaded = run_on_ranks(loaded_logits, 1, str(tmp_path / "step=2"))[0]
    assert loaded == pytest.approx(saved, abs=2e-6)
    assert len(set(loaded)) > 100


# --------------------------------------------------------------------------------------------------------- damaged


def save(directory: str | Path, *, max_steps: int = 1, **options: Any) -> None:
    """A run that saves every step."""
    keep = keeping(directory, every_n_train_steps=1)
    small_runs.fit(small_runs.build_llama(), max_steps=max_steps, callbacks=[keep], **options)


def resume(path: Path, *, inspect: Any = None, **config: Any) -> None:
    small_runs.fit(small_runs.build_llama(**config), max_steps=2, ckpt_path=str(path), inspect=inspect)


def refused(run: Callable[..., Any], *arguments: Any, error: type[Exception] = CheckpointError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        run(*arguments, **options)
    return str(caught.value)


def failing_loads(directory: str, damages: list[str]) -> dict[str, Any]:
    """The answer to each damage of a good checkpoint."""
    good = Path(directory) / "step=1"
    save(directory)
    answers: dict[str, Any] = {}
    for damage in damages:
        path = _damaged(good, damage)
        installed = {**loading.versions(), **({"megatron-core": "0.16.1"} if damage == OLDER else {})}
        with mock.patch.object(loading, "versions", lambda installed=installed: installed):
            answers[damage] = refused(resume, path)
    answers["another model"] = refused(resume, good, hidden_size=64)
    answers["unreadable"] = unreadable_on_one_rank(good)
    answers["slow hashes"] = with_slow_hashes(good.with_name("flipped"))
    return answers


def unreadable_on_one_rank(path: Path) -> str:
    """A disk fails under rank 1 while the others can read."""

    def failing(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    read = failing if torch.distributed.get_rank() == 1 else reading._read_into
    with mock.patch.object(reading, "_read_into", read):
        return refused(resume, path)


def with_slow_hashes(path: Path) -> tuple[str, list[str]]:
    """A damaged checkpoint is read to its end long before its hashes are known; what was done, in order."""
    done: list[str] = []
    sha256, read = files.sha256, reading._read_into

    def slow(path: Any) -> str:
        if str(path).endswith(".distcp"):
            done.append("begins to hash")
            time.sleep(1.0)
        return sha256(path)

    def told(*args: Any) -> None:
        read(*args)
        done.append("reads")

    with mock.patch.object(files, "sha256", slow), mock.patch.object(reading, "_read_into", told):
        message = refused(resume, path, inspect=done.append)
    assert torch.distributed.is_initialized()
    return message, done


def _damaged(checkpoint: Path, damage: str) -> Path:
    copy = checkpoint.with_name(damage)
    if torch.distributed.get_rank() == 0:
        shutil.copytree(checkpoint, copy)
        shards = sorted((copy / "weights").glob("*.distcp"))
        if damage == "truncated":
            os.truncate(shards[-1], shards[-1].stat().st_size // 2)
        elif damage == "flipped":
            _flip_a_bit(shards[-1])
        elif damage == "flipped pickle":
            content = shards[-1].read_bytes()
            shards[-1].write_bytes(content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", 1))
        elif damage == "flipped common":
            # Megatron-Core 0.19 keeps the common state with the tensors.
            common = copy / "weights" / "common.pt"
            _flip_a_bit(common if common.exists() else shards[0])
        elif damage == "missing":
            shards[-1].unlink()
        elif damage == "manifest":
            (copy / "manifest.json").write_text('{"step": 1,')
        elif damage == "no metadata":
            (copy / "weights" / "metadata.json").unlink()
        elif damage == "empty":
            shutil.rmtree(copy)
            copy.mkdir()
    torch.distributed.barrier()
    return copy


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


OLDER = "older library"
DAMAGES = {
    "flipped": r"flipped is damaged: weights/\S+\.distcp has changed since it was written \(its SHA-256 differs\)",
    "flipped pickle": r"flipped pickle is damaged: weights/\S+\.distcp has changed since it was written",
    "flipped common": r"is damaged: weights/\S+ has changed since it was written",
    "truncated": r"truncated is damaged: weights/\S+\.distcp has \d+ bytes, but \d+ were written.*another checkpoint",
    "missing": r"missing is damaged: weights/\S+\.distcp is missing",
    "manifest": r"manifest\.json cannot be read.*damaged",
    "no metadata": r"no metadata is damaged: weights/metadata\.json is missing",
    "empty": r"empty contains no Megatron-Core checkpoint",
}
if Version(version("megatron-core")) >= Version("0.19"):  # before, checkpoints have a form that 0.16 reads
    DAMAGES[OLDER] = r"written with Megatron-Core 0\.19 or newer.*the installed 0\.16\.1 cannot read"
MESSAGES = DAMAGES | {
    "another model": r"cannot be loaded into this model.*model\.config",
    "unreadable": r"on rank 1, \[Errno 5\] Input/output error",
}


@pytest.fixture(scope="module")
def failed_loads(run_on_ranks, tmp_path_factory) -> list[dict[str, Any]]:
    return run_on_ranks(failing_loads, 2, str(tmp_path_factory.mktemp("loads")), list(DAMAGES))


@pytest.mark.quick
def test_what_cannot_be_loaded_is_named_on_every_rank_and_none_waits(failed_loads):
    for answers in failed_loads:
        for case, pattern in MESSAGES.items():
            assert re.search(pattern, answers[case], re.DOTALL), answers[case]


def test_hashes_are_taken_while_tensors_are_read_and_waited_for_before_they_are_used(failed_loads):
    for message, done in (answers["slow hashes"] for answers in failed_loads):
        assert "SHA-256 differs" in message
        assert done[0] == "begins to hash" and done[-1] == "reads", done


# ---------------------------------------------------------------------------------------------------- where it can't

BOTH = {"now": False, "in the background": True}
"""Whether a save is in the background."""


def failing_saves(directory: str) -> dict[str, Any]:
    """Saves that fail, by what is in their way: the message, and the names that are left."""
    rank, found = torch.distributed.get_rank(), {}

    def failed(case: str, *, blocked: bool = False, error: Any = CheckpointError, **options: Any) -> None:
        folder = Path(directory, case)
        if blocked and rank == 0:
            folder.write_text("not a directory")
        torch.distributed.barrier()
        place = folder / "checkpoints" if blocked else folder
        message = refused(save, place, error=error, tensor_model_parallel_size=2, **options)
        torch.distributed.barrier()
        # A save that all ranks have written waits for the next start, which publishes it.
        hidden = (".run", ".lock", *([".unfinished"] if case.startswith("unseen") else []))
        names = [] if blocked else sorted(path.name for path in folder.iterdir() if not path.name.startswith(hidden))
        found[case] = message, names

    write_item, write_files, size, written = (
        filesystem_async._write_item, writing.WatchedSaveStrategy.write_files, io._size, io._written,
    )  # fmt: skip

    @functools.wraps(write_item)
    def full_disk(*args: Any, **kwargs: Any) -> Any:
        """Rank 1's writer fails while rank 0's works, over a good checkpoint of an earlier step."""
        if rank == 1 and Path(directory, "full", "step=1").exists():
            raise OSError(28, "No space left on device")
        return write_item(*args, **kwargs)

    def limited(*args: Any) -> None:
        """Rank 1's files may not be as large as they need to be."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192 if rank == 1 else limits[0], limits[1]))
        try:
            write_files(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def seen(path: Path) -> Any:
        """A disk for each rank, so that rank 0 doesn't see rank 1's files: each node has a disk of its own under this name."""
        return None if rank == 0 and path.name.startswith("__1_") else size(path)

    def removed(temporary: Path, hashes: dict[str, str]) -> Any:
        for file in temporary.glob("weights/__1_*" if rank == 1 else "-"):
            file.unlink()
        return written(temporary, hashes)

    def unreported(temporary: Path, hashes: dict[str, str]) -> Any:
        """Rank 1's shards are gone, and it says that it wrote none: all that ranks report of themselves is consistent."""
        sizes = removed(temporary, hashes)
        return sizes if rank == 0 else {}

    for when, asynchronous in BOTH.items():
        failed(f"blocked {when}", blocked=True, ckpt_async_save=asynchronous)
        with mock.patch.object(io, "_size", seen):
            failed(f"unseen {when}", ckpt_async_save=asynchronous)
    with mock.patch.object(filesystem_async, "_write_item", full_disk):
        failed("full", max_steps=2)
    with mock.patch.object(writing.WatchedSaveStrategy, "write_files", limited):
        failed("limited", error=SaveFailed)
    with mock.patch.object(io, "_written", unreported):
        failed("unreported")
    with mock.patch.object(io, "_written", removed):
        failed("removed")
    found["path"] = a_path_of_its_own(f"{directory}/path")
    return found


def a_path_of_its_own(directory: str) -> list[str]:
    """A name with the clock in it, which each rank reads for itself."""
    rank = torch.distributed.get_rank()
    small_runs.fit(
        small_runs.build_llama(),
        max_steps=1,
        tensor_model_parallel_size=2,
        inspect=lambda trainer: trainer.save_checkpoint(f"{directory}/at-second-{rank}"),
    )
    (path,) = [path for path, _ in files.finished(Path(directory))]
    return [path.name, *files.problems(path), *sorted(file.name for file in (path / "weights").glob("*.distcp"))]


@pytest.fixture(scope="module")
def failed_saves(run_on_ranks, tmp_path_factory) -> list[dict[str, Any]]:
    return run_on_ranks(failing_saves, 2, str(tmp_path_factory.mktemp("saves")))


@pytest.mark.parametrize("when", BOTH)
def test_a_place_that_cannot_be_written_is_named_on_every_rank(failed_saves, when):
    for message, _ in (found[f"blocked {when}"] for found in failed_saves):
        assert "Cannot write" in message and f"/blocked {when}" in message and "log.log_dir" in message


def test_a_failing_writer_on_one_rank_is_an_error_on_all_and_leaves_nothing(failed_saves):
    # Megatron-Core 0.19 passes on the kind of the error only.
    assert "No space left" in failed_saves[0]["full"][0] or "OSError" in failed_saves[0]["full"][0]
    for message, names in (found["full"] for found in failed_saves):
        assert "Saving" in message and "on rank 1" in message or "on another rank" in message
        assert "earlier checkpoints are unchanged" in message
        assert names == ["step=1"]


def test_a_failed_save_names_the_systems_reason_on_every_rank(failed_saves):
    for message, _ in (found["limited"] for found in failed_saves):
        assert "unexpected pos" not in message and "on another rank" not in message, message
        assert "on rank 1" in message and "File too large: the limit of this process is 8192 bytes" in message, message


@pytest.mark.parametrize("when", BOTH)
def test_a_checkpoint_is_named_only_once_every_ranks_files_are_proven(failed_saves, when):
    for message, names in (found[f"unseen {when}"] for found in failed_saves):
        assert "Rank 1 wrote weights/__1_" in message and "isn't there for rank 0" in message
        assert "directory that all nodes share" in message and names == []


def test_a_checkpoint_without_a_shard_that_its_index_names_is_never_published(failed_saves):
    for message, names in (found["unreported"] for found in failed_saves):
        assert "shards are missing" in message and "__1_" in message and names == []


def test_a_shard_that_was_removed_is_no_disk_that_ranks_do_not_share(failed_saves):
    for message, names in (found["removed"] for found in failed_saves):
        assert "of rank 1 was removed" in message and "share" not in message and names == []


def test_all_ranks_write_to_the_name_that_rank_0_has(failed_saves):
    for found in failed_saves:
        assert found["path"][0] == "at-second-0" and any(name.startswith("__1_") for name in found["path"][1:]), found


def fallen_back(directory: str, sharded: bool) -> dict[str, Any]:
    """A run that saves every step, and what goes on from its newest checkpoint after a bit of it has flipped."""

    def fit(*, fall_back: bool = False, **options: Any) -> list[float]:
        small_runs.release()
        strategy = nl.FSDP2Strategy() if sharded else nl.MegatronStrategy(ckpt_async_save=False)
        strategy.checkpoint_io.fall_back = fall_back  # pyright: ignore[reportAttributeAccessIssue]
        ran = small_runs.fit(
            small_runs.build_llama(), max_steps=3, strategy=strategy, inspect=lambda one: str(one.ckpt_path), **options
        )
        found["went on from"] = ran["inspected"]
        return ran["losses"]

    found: dict[str, Any] = {}
    keep = keeping(directory, every_n_train_steps=1)
    found["whole"] = fit(callbacks=[keep])
    newest = Path(directory) / "step=2"
    if torch.distributed.get_rank() == 0:
        _flip_a_bit(sorted((newest / "weights").glob("*.distcp"))[0])
        shutil.rmtree(Path(directory) / "step=3")
    torch.distributed.barrier()
    found["resumed"] = fit(fall_back=True, ckpt_path=newest)
    found["refused"] = refused(fit, ckpt_path=newest)
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_only_where_it_may(run_on_ranks, tmp_path, sharded):
    for found in run_on_ranks(fallen_back, 2, str(tmp_path), sharded, timeout=90.0):
        assert found["resumed"] == found["whole"][1:]
        assert found["went on from"] == str(tmp_path / "step=1")  # of which Lightning says "Restored all states from"
        assert "SHA-256 differs" in found["refused"]


def test_a_failed_save_says_how_little_room_is_left(tmp_path, monkeypatch):
    """torch's writer of archives tells a full disk as an "unexpected pos"."""
    for free, inodes, said in (
        (1 << 40, 1, ""),
        (300_000, 1, " (0.3 MB are free on this disk)"),
        (1 << 40, 0, " (this disk has no inode left for another file: delete files)"),
    ):
        disk = types.SimpleNamespace(f_bavail=free, f_frsize=1, f_files=1, f_favail=inodes)
        monkeypatch.setattr(io.os, "statvfs", lambda _, disk=disk: disk)
        assert io._room(tmp_path / "step=1") == said
