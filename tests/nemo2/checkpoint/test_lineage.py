# SPDX-License-Identifier: Apache-2.0
"""Which run a directory and its checkpoints belong to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo2.checkpoint.directory import Manifest, publish, read_manifest, temporary_name
from nemo2.checkpoint.lineage import begin, own_finished, run_of


def saved(target: Path, step: int, said: dict[str, Any]) -> Path:
    temporary = temporary_name(target)
    temporary.mkdir(parents=True)
    publish(temporary, target, Manifest(step=step, consumed_samples=0, layout={}, **said))
    return target


def test_a_run_keeps_its_id_over_restarts_and_a_new_start_is_another_run(tmp_path):
    first = begin(tmp_path, None)
    checkpoint = saved(tmp_path / "step=3", 3, first.signature())
    assert begin(tmp_path, checkpoint) == first == run_of(tmp_path)
    second = begin(tmp_path, None)
    assert second.id != first.id and second.lineage == () and run_of(tmp_path) == second
    assert own_finished(tmp_path) == [], "the checkpoint is the first run's"
    # One that is named is taken up, and its run with it.
    assert begin(tmp_path, checkpoint) == first


def test_a_run_that_goes_on_from_another_directory_remembers_where_it_comes_from(tmp_path):
    first = begin(_made(tmp_path / "a"), None)
    there = saved(tmp_path / "a" / "step=3", 3, first.signature())
    second = begin(_made(tmp_path / "b"), there)
    assert second.lineage == (first.id,) and second.id != first.id
    assert begin(tmp_path / "b", there) == second, "the same command again is the same run"
    third = begin(_made(tmp_path / "c"), saved(tmp_path / "b" / "step=6", 6, second.signature()))
    assert third.lineage == (first.id, second.id)


def test_checkpoints_from_before_there_were_ids_belong_to_whoever_has_them(tmp_path):
    old = saved(tmp_path / "step=3", 3, {})
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
    manifest = read_manifest(saved(tmp_path / "step=3", 3, run.signature()))
    assert manifest is not None and (manifest.run, manifest.lineage) == (run.id, ["earlier"])


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
