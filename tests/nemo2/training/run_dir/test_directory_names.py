# SPDX-License-Identifier: Apache-2.0
"""The names of new run directories."""

from pathlib import Path

import pytest

from nemo2.preflight.checks.earlier import directory_to_continue
from nemo2.training.run_dir.directory import NAMED_VERSION_VARIABLE, VERSION_VARIABLE, choose_directory
from nemo2.training.run_dir.logger import NeMoLogger


def test_runs_that_begin_in_one_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo2.training.run_dir.directory.timestamp", lambda: "2026-01-02_03-04-05")
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)
    versions = []
    for _ in range(3):
        directory = choose_directory(
            name="one",
            log_dir=str(tmp_path),
            explicit_log_dir=None,
            version=None,
            use_datetime_version=True,
            resume_if_exists=False,
        )
        directory.log_dir.mkdir(parents=True)
        versions.append(directory.version)
    assert versions == ["2026-01-02_03-04-05", "2026-01-02_03-04-05_2", "2026-01-02_03-04-05_3"]


@pytest.mark.parametrize("version", [None, "mine"])
def test_a_launch_looks_at_the_run_that_the_ranks_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setenv(NAMED_VERSION_VARIABLE, "named")
    log = NeMoLogger(name="one", log_dir=str(tmp_path), version=version)
    chosen = choose_directory(
        name=log.name,
        log_dir=log.log_dir,
        explicit_log_dir=None,
        version=version,
        use_datetime_version=True,
        resume_if_exists=True,
    )
    assert directory_to_continue(log, newest=True) == chosen.log_dir == tmp_path / "one" / (version or "named")
