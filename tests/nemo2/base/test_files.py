# SPDX-License-Identifier: Apache-2.0
"""Files that get their name once they are complete: what an error leaves, and what they may not replace."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.base.files import append, output_file, output_folder, replacing, write_file


def test_the_file_has_the_whole_new_contents_or_its_old_ones(tmp_path):
    file = tmp_path / "new" / "f.txt"
    with replacing(file) as unfinished:
        unfinished.write_text("one")
        assert not file.exists()
    with pytest.raises(RuntimeError), replacing(file) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert file.read_text() == "one" and os.listdir(file.parent) == ["f.txt"]


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as unfinished:
        unfinished.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("link", [False, True])
def test_a_device_or_pipe_is_refused_before_anything_is_written(tmp_path, link):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    with pytest.raises(ConfigError, match="is a device or pipe"), replacing(tmp_path / "link" if link else pipe):
        pytest.fail("the block ran")
    assert pipe.is_fifo() and sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_folder_that_could_not_get_its_name_at_the_end_is_refused_first(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match=r"link is a link to .*gone, which doesn't exist"):
        output_folder(tmp_path / "link")
    assert output_folder(tmp_path / "old") == tmp_path / "old"
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}: this user has no permission to write it"):
        output_folder(tmp_path / "old")


def test_a_file_that_could_not_be_replaced_at_the_end_is_refused_first(tmp_path, monkeypatch):
    file, new = tmp_path / "old.txt", tmp_path / "new.txt"
    file.write_text("old")
    full = os.statvfs_result((1, 1, 9, 0, 0, 9, 9, 9, 0, 255))
    with monkeypatch.context() as context:
        context.setattr("os.statvfs", lambda path: full)
        for path in (file, new):
            with pytest.raises(RuntimeFault, match=f"{path}: this disk is full"):
                output_file(path)
        assert output_file("/dev/null") == Path("/dev/null")
    assert [output_file(path) for path in (file, new)] == [file, new]
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for path in (file, new):
        with pytest.raises(ConfigError, match=f"{path}: this user has no permission to write it"):
            output_file(path)


def test_what_a_killed_writer_left_is_deleted_and_what_a_living_one_writes_stays(tmp_path):
    file = tmp_path / "f.txt"
    code = (
        "import os, sys; from nemo2.base.files import replacing\n"
        "with replacing(sys.argv[1]) as new: new.write_text('half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, file])
    (dead,) = os.listdir(tmp_path)
    with replacing(file) as unfinished:
        unfinished.write_text("first")
        assert os.listdir(tmp_path) == [unfinished.name] != [dead]
        with replacing(file) as other:
            other.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first" and os.listdir(tmp_path) == ["f.txt"]


@pytest.mark.parametrize("existing", [True, False])
def test_a_file_that_a_full_disk_refuses_is_what_it_was(tmp_path, existing):
    file = tmp_path / "f.txt"
    if existing:
        file.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RuntimeFault, match=r"f.txt can't be written: File too large. What was there is unchanged"):
            write_file(file, "new" * 4096)
        if existing:
            append(file, " line\n")
            with pytest.raises(OSError, match="File too large"):
                append(file, "new" * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f.txt", "old line\n")] * existing
