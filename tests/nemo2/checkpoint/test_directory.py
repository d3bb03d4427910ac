# SPDX-License-Identifier: Apache-2.0
"""A checkpoint exists when it is whole: at every point where a save may be killed, the previous one is what is found."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import CheckpointError
from nemo2.checkpoint import directory
from nemo2.checkpoint.directory import (
    changed,
    finished,
    problems,
    publish,
    read_manifest,
    set_aside,
    unusable,
)
from nemo2.checkpoint.leftovers import clean_up
from nemo2.checkpoint.paths import checkpoint_at, checkpoints_of_runs
from support.saved_checkpoints import manifest, saved, written


def test_a_published_checkpoint_says_what_it_holds(tmp_path):
    checkpoint = saved(tmp_path / "a", 3, metrics={"val_loss": 2.5})
    read = read_manifest(checkpoint)
    assert read is not None
    assert (read.step, read.consumed_samples, read.metrics) == (3, 24, {"val_loss": 2.5})
    assert read.files == {"weights/part": 6}
    assert problems(checkpoint) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def calls_of(action: Any) -> int:
    """How many changes to the file system an action makes."""
    count = [0]
    with counted(lambda: count.__setitem__(0, count[0] + 1)):
        action()
    return count[0]


class counted:
    """Calls `tell` before each rename, removal and flush, and each write of a file's text, that `directory` makes."""

    def __init__(self, tell: Any) -> None:
        self.tell = tell

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for owner, name in (
            (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "write_text"),
        ):  # fmt: skip
            self.patch.setattr(owner, name, self._telling(getattr(owner, name)))

    def __exit__(self, *exc_info: object) -> None:
        self.patch.undo()

    def _telling(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.tell()
            return function(*args, **kwargs)

        return call


def killed_at(action: Any, call: int) -> None:
    """Run `action` in a process that is killed right before its n-th change to the file system."""
    pid = os.fork()
    if pid == 0:
        left = [call]

        def tell() -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        with counted(tell):
            action()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("same_name", [False, True], ids=["another name", "the same name"])
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint_whole(tmp_path, same_name):
    def prepare(folder: Path) -> tuple[Path, Any]:
        folder.mkdir()
        old = saved(folder / "step=1", 1, "old")
        new = old if same_name else folder / "step=2"
        temporary = written(new, 2, "newer")
        return folder, lambda: publish(temporary, new, manifest(2))

    _, action = prepare(tmp_path / "counting")
    calls = calls_of(action)
    assert calls >= 5
    for call in range(calls):
        folder, action = prepare(tmp_path / str(call))
        killed_at(action, call)
        found = finished(folder)
        assert found, f"killed before change {call}: nothing is left"
        for path, read in found:
            assert problems(path) == []
            assert (path / "weights" / "part").read_text() == {1: "old", 2: "newer"}[read.step]
        clean_up(folder)
        again = finished(folder)
        assert [read.step for _, read in again] == [read.step for _, read in found]
        assert len(list(folder.iterdir())) == len(again), "clean_up left something behind"


def test_a_checkpoint_of_another_run_keeps_its_name_and_an_unknown_folder_is_set_aside(tmp_path):
    target = saved(tmp_path / "step=3", 3, "first", run="one")
    with pytest.raises(CheckpointError, match="is a checkpoint of run one, but this run is two"):
        saved(target, 3, "second", run="two")
    assert (target / "weights" / "part").read_text() == "first"
    saved(target, 3, "again", run="one")
    (target / "manifest.json").write_text("{")
    saved(target, 3, "whole", run="one")
    (aside,) = tmp_path.glob(".damaged-*")
    assert (aside / "weights" / "part").read_text() == "again" and (target / "weights" / "part").read_text() == "whole"


def test_a_folder_that_is_no_checkpoint_is_never_deleted_for_one(tmp_path):
    """`trainer.save_checkpoint` takes any path, and has no run."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes.txt").write_text("mine")
    saved(tmp_path / "results", 1)
    [aside] = tmp_path.glob(".damaged-*")
    assert (aside / "notes.txt").read_text() == "mine" and problems(tmp_path / "results") == []


def test_a_kill_while_deleting_leaves_nothing_that_looks_like_a_checkpoint(tmp_path):
    sample = saved(tmp_path / "counting", 1)
    calls = calls_of(lambda: directory.remove(sample))
    assert calls >= 4
    for call in range(1, calls):
        checkpoint = saved(tmp_path / f"step={call}", 1)
        killed_at(lambda checkpoint=checkpoint: directory.remove(checkpoint), call)
        assert finished(tmp_path) == []
        assert clean_up(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_clean_up_leaves_checkpoints_and_files_of_others(tmp_path):
    saved(tmp_path / "step=1", 1)
    written(tmp_path / "step=2", 2)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    assert [path.name.startswith(".unfinished-") for path in clean_up(tmp_path)] == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "other", "step=1"]


def test_of_a_checkpoint_that_is_reached_by_a_link_the_link_is_deleted(tmp_path):
    """On another disk, say. What an older version has left of such links is cleaned up."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    target = saved(elsewhere / "step=1", 1)
    (folder / "step=1").symlink_to(target)
    assert [read.step for _, read in finished(folder)] == [1]
    directory.remove(folder / "step=1")
    assert list(folder.iterdir()) == []
    (folder / ".trash-1-step=1").symlink_to(target)
    assert len(clean_up(folder)) == 1 and list(folder.iterdir()) == []
    assert finished(elsewhere), "what it led to is somebody's own"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: (path / "weights" / "part").write_text("x"), "weights/part has 1 bytes, but 6 were written"),
        (lambda path: (path / "weights" / "part").unlink(), "weights/part is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    ],
)
def test_damage_is_seen_by_names_and_sizes(tmp_path, damage, expected):
    checkpoint = saved(tmp_path / "step=3", 3)
    damage(checkpoint)
    assert problems(checkpoint) == [expected]


def test_a_flipped_bit_is_seen_by_the_hash_and_not_by_the_size(tmp_path):
    checkpoint = saved(tmp_path / "step=3", 3)
    assert changed(checkpoint) == []
    (checkpoint / "weights" / "part").write_text("step 2")
    assert problems(checkpoint) == []
    assert changed(checkpoint) == ["weights/part has changed since it was written (its SHA-256 differs)"]


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(5, "Input/output error"), "Input/output error"), (MemoryError("no"), "MemoryError")]
)
def test_a_file_whose_hash_cannot_be_taken_is_no_good_one(tmp_path, monkeypatch, error, told):
    def failing(path: Any) -> str:
        raise error

    checkpoint = saved(tmp_path / "step=3", 3)
    monkeypatch.setattr("nemo2.checkpoint.directory.sha256", failing)
    [problem] = changed(checkpoint)
    assert problem.startswith("weights/part cannot be read") and told in problem


def test_hashes_that_the_writers_took_are_believed_and_the_others_are_taken(tmp_path):
    temporary = written(tmp_path / "step=3", 3)
    (temporary / "weights" / "other").write_text("abc")
    publish(temporary, tmp_path / "step=3", manifest(3), {"weights/part": "given"})
    read = read_manifest(tmp_path / "step=3")
    assert read is not None
    assert read.hashes == {
        "weights/part": "given",
        # The test vector of FIPS 180-2 for "abc".
        "weights/other": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }


def test_a_lost_context_is_not_damage(tmp_path):
    temporary = written(tmp_path / "step=3", 3)
    (temporary / "context").mkdir()
    (temporary / "context" / "model.json").write_text("{}")
    publish(temporary, tmp_path / "step=3", manifest(3))
    (tmp_path / "step=3" / "context" / "model.json").unlink()
    assert problems(tmp_path / "step=3") == []
    assert problems(tmp_path / "step=3", of_context=True) == ["context/model.json is missing"]


def test_what_is_set_aside_is_neither_found_nor_cleaned_up_but_told(tmp_path):
    saved(tmp_path / "step=1", 1)
    aside = set_aside(saved(tmp_path / "step=3", 3))
    assert [read.step for _, read in finished(tmp_path)] == [1]
    assert clean_up(tmp_path) == []
    assert unusable(tmp_path) == {aside: "was damaged and has been set aside"}
    (tmp_path / "step=1" / "manifest.json").unlink()
    assert unusable(tmp_path)[tmp_path / "step=1"] == "manifest.json is missing"


def test_an_unreadable_manifest_names_the_file_and_where_to_look_next(tmp_path):
    checkpoint = saved(tmp_path / "step=3", 3)
    (checkpoint / "manifest.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"step=3/manifest\.json cannot be read.*Resume from another checkpoint in"
    ):
        read_manifest(checkpoint)
    assert finished(tmp_path) == []


@pytest.mark.parametrize("where", ["the directory", "the manifest"])
def test_what_this_user_may_not_read_is_no_damage(tmp_path, monkeypatch, where):
    saved(tmp_path / "step=3", 3)

    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    if where == "the directory":
        monkeypatch.setattr(Path, "iterdir", refuse)
        with pytest.raises(CheckpointError, match="no permission"):
            finished(tmp_path)
    else:
        monkeypatch.setattr(directory, "read_bounded", refuse)
        with pytest.raises(CheckpointError, match="no permission"):
            read_manifest(tmp_path / "step=3")


def test_checkpoints_are_ordered_by_step_and_then_by_age(tmp_path):
    for name, step in (("b", 10), ("a", 9), ("c", 10)):
        saved(tmp_path / name, step)
    assert [path.name for path, _ in finished(tmp_path)] == ["a", "b", "c"]
    assert finished(tmp_path / "nowhere") == []


def test_names_of_checkpoints():
    assert directory.ckpt_to_dir("/x/run--step=3.ckpt") == Path("/x/run--step=3")
    assert directory.ckpt_to_dir("/x/val_loss=2.53-step=3") == Path("/x/val_loss=2.53-step=3")
    assert directory.without_last(Path("/x/step=3-last")) == Path("/x/step=3")
    assert directory.step_in_name(Path("llama--val_loss=2.53-step=120-consumed_samples=960-last")) == 120
    assert directory.step_in_name(Path("weights")) is None


def test_a_model_that_is_written_beside_the_checkpoints_of_a_run_is_not_the_runs_newest(tmp_path):
    trained = saved(tmp_path / "tuned" / "1" / "checkpoints" / "step=3", 3)
    merged = [saved(tmp_path / place, 0) for place in ("tuned/merged", "tuned/1/merged")]
    assert checkpoint_at(str(tmp_path / "tuned")) == checkpoint_at(str(tmp_path / "tuned" / "1")) == trained
    assert checkpoint_at(str(merged[0])) == merged[0]
    assert set(checkpoints_of_runs(tmp_path / "tuned")) == {trained, merged[0]}, "what an overwrite would delete"
