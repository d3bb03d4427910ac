# SPDX-License-Identifier: Apache-2.0
"""Which run a directory and its checkpoints belong to."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nemo2.base.errors import CheckpointError
from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.lineage import begin, own_finished, run_of
from support.saved_checkpoints import saved


def test_a_run_keeps_its_id_over_restarts_and_a_new_start_is_another_run(tmp_path):
    first = begin(tmp_path, None)
    second = begin(tmp_path, None)
    assert second.id != first.id and second.lineage == () and run_of(tmp_path) == second
    checkpoint = saved(tmp_path / "step=3", 3, **second.signature())
    assert begin(tmp_path, checkpoint) == second == run_of(tmp_path)


def test_a_directory_with_checkpoints_of_another_run_is_refused_with_both_ids(tmp_path):
    first = begin(_made(tmp_path / "a"), None)
    checkpoint = saved(tmp_path / "a" / "step=3", 3, **first.signature())
    elsewhere = saved(tmp_path / "b" / "step=6", 6, run="other", lineage=[])
    before = contents(tmp_path)
    for start in (None, elsewhere):
        with pytest.raises(
            CheckpointError, match=f"step=3.* of run {first.id}, but this run is .*log.explicit_log_dir"
        ):
            begin(tmp_path / "a", start)
    # A directory in which an earlier version of nemo2 let two runs write.
    foreign = saved(tmp_path / "a" / "step=9", 9, run="other", lineage=[])
    with pytest.raises(CheckpointError, match=f"step=9.* of run other, but this run is {first.id}"):
        begin(tmp_path / "a", checkpoint)
    shutil.rmtree(foreign)
    assert contents(tmp_path) == before
    assert begin(tmp_path / "a", checkpoint) == first


def test_a_new_run_takes_no_checkpoints_without_an_id(tmp_path):
    old = saved(tmp_path / "step=3", 3)
    with pytest.raises(CheckpointError, match="of run without an id"):
        begin(tmp_path, None)
    assert begin(tmp_path, old) == run_of(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_goes_on_from_another_directory_remembers_where_it_comes_from(tmp_path):
    first = begin(_made(tmp_path / "a"), None)
    there = saved(tmp_path / "a" / "step=3", 3, **first.signature())
    second = begin(_made(tmp_path / "b"), there)
    assert second.lineage == (first.id,) and second.id != first.id
    assert begin(tmp_path / "b", there) == second, "the same command again is the same run"
    third = begin(_made(tmp_path / "c"), saved(tmp_path / "b" / "step=6", 6, **second.signature()))
    assert third.lineage == (first.id, second.id)


def test_checkpoints_from_before_there_were_ids_belong_to_whoever_has_them(tmp_path):
    old = saved(tmp_path / "step=3", 3)
    run = begin(tmp_path, old)
    assert run.id and own_finished(tmp_path)[0][0] == old
    assert begin(tmp_path, old) == run


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 1}', "\0"])
def test_a_damaged_file_says_nothing(tmp_path, content):
    (tmp_path / ".run").write_text(content)
    assert run_of(tmp_path) is None
    assert begin(tmp_path, None) == run_of(tmp_path)


def test_the_manifest_says_it(tmp_path):
    run = replace(begin(tmp_path, None), lineage=("earlier",))
    manifest = read_manifest(saved(tmp_path / "step=3", 3, **run.signature()))
    assert manifest is not None and (manifest.run, manifest.lineage) == (run.id, ["earlier"])


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
