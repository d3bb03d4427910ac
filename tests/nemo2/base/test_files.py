# SPDX-License-Identifier: Apache-2.0
"""Files that get their name once they are complete: what an error leaves, and what they may not replace."""

import os

import pytest

from nemo2.base.errors import ConfigError
from nemo2.base.files import output_folder, replacing


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
