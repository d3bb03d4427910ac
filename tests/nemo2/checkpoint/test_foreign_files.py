# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that leads out of its folder, never ends, or isn't what its manifest says."""

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from nemo2.base.errors import CheckpointError, ConfigError, SecurityError
from nemo2.base.files import UnusableFile, open_to_write, read_bounded, why_not_inside
from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.directory import Manifest, changed, finished, problems, publish, read_manifest, sha256
from nemo2.checkpoint.foreign_files import read_json, read_yaml
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.lock import DirectoryLock
from nemo2.checkpoint.metadata import read_metadata
from nemo2.checkpoint.nemo_context import describe, load_nemo_model
from nemo2.checkpoint.untrusted import data_only
from nemo2.hugging_face.identify import identify
from nemo2.training.run_dir.directory import create_directory
from nemo2.training.run_dir.log_files import add_log_file, remove_log_file
from support.foreign_checkpoints import nemo, torch_dist

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A finished one of ours."""
    temporary = tmp_path / "runs" / ".unfinished"
    torch_dist(temporary / "weights")
    (temporary / "context").mkdir()
    (temporary / "context" / "tokenizer.json").write_text("{}")
    publish(temporary, tmp_path / "runs" / "step=1", Manifest(step=1, consumed_samples=8, layout={}))
    return tmp_path / "runs" / "step=1"


@pytest.fixture
def secret(tmp_path) -> Path:
    (tmp_path / "secret").write_text("of another folder")
    return tmp_path / "secret"


def said(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """The manifest, rewritten by somebody who doesn't know of the digest, or drops it."""
    data = json.loads((checkpoint / "manifest.json").read_text())
    data.pop("digest", None)
    data |= changes
    (checkpoint / "manifest.json").write_text(json.dumps(data))
    return data


def loaded(checkpoint: Path) -> Any:
    return MegatronCheckpointIO().load_checkpoint(checkpoint)


# ------------------------------------------------------------------------------------------------------ manifests


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "weights/../../../secret", "", "a\0b"])
def test_a_manifest_whose_paths_climb_is_refused_before_anything_is_read(checkpoint, secret, name):
    data = said(checkpoint)
    said(
        checkpoint,
        files={**data["files"], name: secret.stat().st_size},
        hashes={**data["hashes"], name: sha256(secret)},
    )
    for look in (read_manifest, problems, changed, identify, loaded):
        with pytest.raises(CheckpointError, match="is outside its folder"):
            look(checkpoint)
    assert finished(checkpoint.parent) == []


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "folder"])
def test_a_name_of_something_that_is_no_file_is_refused_and_nobody_waits_for_it(checkpoint, secret, kind):
    file = checkpoint / "weights" / "extra.distcp"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else secret)
    data = said(checkpoint)
    size = secret.stat().st_size
    said(
        checkpoint,
        files={**data["files"], "weights/extra.distcp": size},
        hashes={**data["hashes"], "weights/extra.distcp": sha256(secret)},
    )
    assert "weights/extra.distcp is" in str(problems(checkpoint)) and "weights/extra.distcp is" in str(
        changed(checkpoint)
    )
    with pytest.raises((CheckpointError, SecurityError), match="extra.distcp is"):
        loaded(checkpoint)
    with pytest.raises(SecurityError) if kind != "folder" else pytest.MonkeyPatch.context():
        identify(checkpoint, verify=True)


def test_sizes_are_compared_before_bytes(checkpoint, monkeypatch):
    with open(checkpoint / "weights" / "common.pt", "r+b") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(
        "nemo2.checkpoint.directory.sha256",
        lambda path: pytest.fail(f"{path} was read") if "common" in str(path) else "",
    )
    assert any("common.pt has 1099511627776 bytes" in problem for problem in changed(checkpoint))


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"[]", b"3", b'{"step": "x", "consumed_samples": 1, "layout": {}}',
     b'{"step": 1, "consumed_samples": 1, "layout": {}, "files": {"a": -1}}',
     b'{"step": 1, "consumed_samples": 1, "layout": {}, "files": ["a"]}',
     b'{"step": 1, "consumed_samples": 1, "layout": {}, "hashes": {"weights/x": "0"}}'],
    ids=range(9),
)  # fmt: skip
def test_a_manifest_that_is_none_is_a_damaged_checkpoint(checkpoint, content):
    (checkpoint / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read.*damaged"):
        read_manifest(checkpoint)


def test_a_name_that_stands_for_two_values_is_refused_in_every_json_file(checkpoint):
    """Readers differ in which they take: who has looked at a file may have seen another value than what is used."""
    from nemo2.config.reading import from_json

    manifest = checkpoint / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace("{", '{"step": 7,', 1))
    with pytest.raises(CheckpointError, match="'step' stands for two values"):
        read_manifest(checkpoint)
    with pytest.raises(CheckpointError, match="'step' stands for two values"):
        read_json(manifest)
    with pytest.raises(ConfigError, match="'root' stands for two values"):
        from_json('{"root": {"type": "ref", "key": "a"}, "root": {"type": "ref", "key": "b"}, "objects": {}}')
    manifest.write_text(text.replace("{", '{"step": ' + str(read_json_step(text)) + ",", 1))
    assert read_manifest(checkpoint) is not None  # twice the same hides nothing


def read_json_step(text):
    return json.loads(text)["step"]


def test_a_manifest_that_changed_is_told_by_its_own_digest(checkpoint):
    file = checkpoint / "manifest.json"
    text = file.read_text()
    assert read_manifest(checkpoint) is not None
    for old, new in (
        ('"step": 1', '"step": 2'),
        ('"consumed_samples": 8', '"consumed_samples": 9'),
        ('"digest": "', '"digest": "0'),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match="contents have changed since it was written"):
            read_manifest(checkpoint)
    said(checkpoint)
    assert read_manifest(checkpoint) is not None, "a manifest of a version without digests has to stay readable"
    assert "without a digest of itself" in str(identify(checkpoint, verify=True).notes)


def test_verifying_covers_the_context_and_says_what_it_compared(checkpoint):
    found = identify(checkpoint, verify=True)
    assert found.problems == []
    assert "files of weights/ and context/; the manifest matches its own digest" in str(found.notes)
    (checkpoint / "context" / "tokenizer.json").write_text("[]")
    assert identify(checkpoint, verify=True).problems == [
        "context/tokenizer.json has changed since it was written (its SHA-256 differs)"
    ]
    with pytest.raises(CheckpointError, match="context/tokenizer.json has changed"):
        load_context(checkpoint, "tokenizer")


# ------------------------------------------------------------------------------------------------------ weights


def with_path(weights: Path, name: str) -> None:
    metadata = read_metadata(weights)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (weights / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_that_names_files_elsewhere_is_refused_and_torch_alone_would_read_them(tmp_path):
    weights, other = torch_dist(tmp_path / "weights"), torch_dist(tmp_path / "other")
    [shard] = other.glob("*.distcp")
    for name in (str(shard), f"../other/{shard.name}"):
        with_path(torch_dist(weights), name)
        with pytest.raises(SecurityError, match=r"\.metadata names the file .*leads out of its folder"):
            read_metadata(weights)
        with data_only(), pytest.raises(SecurityError):
            FileSystemReader(weights).read_metadata()
        assert name in str(FileSystemReader(weights).read_metadata().storage_data)


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_links_inside_a_checkpoint_are_refused(checkpoint, tmp_path, name, with_manifest):
    file = checkpoint / "weights" / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    if not with_manifest:
        (checkpoint / "manifest.json").unlink()
    for look in (loaded, identify):
        with pytest.raises(SecurityError, match=f"{name} is a link to .*from its own folder only"):
            look(checkpoint)


def test_a_folder_inside_a_checkpoint_that_is_a_link_is_refused(checkpoint, tmp_path):
    (checkpoint / "weights").rename(tmp_path / "elsewhere")
    (checkpoint / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecurityError, match="weights is a link to"):
        loaded(checkpoint)
    (tmp_path / "named").symlink_to(checkpoint)
    assert problems(tmp_path / "named") == [] or "link" in str(problems(tmp_path / "named"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda weights: (weights / "common.pt").unlink(), "common.pt is missing"),
        (lambda weights: (weights / "metadata.json").write_bytes(b"\xff\xfe\x00"), "metadata.json is not valid JSON"),
        (lambda weights: (weights / "metadata.json").write_bytes(b"[" * 100_000), "metadata.json is not valid JSON"),
        (lambda weights: (weights / "metadata.json").write_text("[]"), "names no sharded_backend"),
        (lambda weights: (weights / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "format 'zarr'"),
    ],
    ids=["no common.pt", "binary", "deep", "list", "zarr"],
)
def test_a_checkpoint_without_a_manifest_is_refused_by_the_file_that_is_wrong(tmp_path, harm, words):
    harm(torch_dist(tmp_path / "weights"))
    with pytest.raises(CheckpointError, match=words):
        loaded(tmp_path)


# ------------------------------------------------------------------------------------------------------ YAML and JSON


def bomb(levels: int = 60) -> bytes:
    lines = ["a0: &a0 [x, x, x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bomb(), "more than 200000 values"),
        (b"a: &a [*a]\n", "more than 200000 values|is not YAML"),
        # PyYAML from 6.0.4 on stops at a depth of 1,000 itself, before it reports the first of them.
        (b"[" * 100_000, "100 levels deep|maximum nesting depth"),
        (b"[" * 400 + b"]" * 400, "100 levels deep"),
        (b"a:\n" + b"".join(b" " * n + b"a:\n" for n in range(1, 400)), "100 levels deep"),
        (b"\xff\xfe\x00\x01", "is not YAML with plain data"),
        (b"a: !!python/object/apply:os.system [echo]\n", "is not YAML with plain data"),
        (b"x: *nobody\n", "more than 200000 values|is not YAML"),
        (b"? {a: b}\n: c\n", "is not YAML with plain data"),
    ],
    ids=["aliases", "itself", "very deep", "deep", "deep blocks", "binary", "tag", "unknown alias", "key"],
)
def test_yaml_from_elsewhere_is_bounded(tmp_path, content, words):
    path = nemo(tmp_path, content)
    with pytest.raises(CheckpointError, match=words):
        load_nemo_model(path)
    assert describe(path) and identify(path).notes


def test_files_that_are_too_large_or_none_are_not_read(tmp_path):
    path = nemo(tmp_path, b"")
    file = path / "context" / "model.yaml"
    os.truncate(file, 1 << 40)
    with pytest.raises(CheckpointError, match=r"it has 1099511627776 bytes, and at most"):
        read_yaml(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="no regular file"):
        read_json(file)


def test_plain_yaml_with_a_few_aliases_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {b: [1, 2]}\nc: *a\nd: *a\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2]}}


# ------------------------------------------------------------------------------------------------------ writing


def test_a_lock_that_is_a_link_leaves_its_target_as_it_is(tmp_path, secret):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".lock").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"\.lock is a link to .*secret, and no run has created it"):
        DirectoryLock(tmp_path / "runs").acquire()
    assert secret.read_text() == "of another folder"


def test_a_log_that_is_a_link_is_not_appended_to(tmp_path, secret):
    (tmp_path / "log.txt").symlink_to(secret)
    with pytest.raises(UnusableFile, match="is a link to"):
        add_log_file(tmp_path / "log.txt")
    assert secret.read_text() == "of another folder"
    add_log_file(tmp_path / "other.txt")
    logging.getLogger("nemo2").warning("something")
    remove_log_file()
    assert "something" in (tmp_path / "other.txt").read_text()


def test_a_run_does_not_write_into_a_folder_with_links_to_files(tmp_path, secret):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "disk").mkdir()
    (folder / "checkpoints").symlink_to(tmp_path / "disk")
    create_directory(folder, field="log.log_dir")
    (folder / "hparams.yaml").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"hparams\.yaml is a link to .*secret.*Remove the link"):
        create_directory(folder, field="log.log_dir")


def test_files_are_opened_only_where_they_are_files(tmp_path, secret):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(secret)
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="no regular file|is a link|No such device"):
            open_to_write(tmp_path / name)
        with pytest.raises(UnusableFile):
            read_bounded(tmp_path / name, at_most=100, follow=False)
    assert read_bounded(tmp_path / "link", at_most=100) == b"of another folder"
    with pytest.raises(UnusableFile, match="at most 3"):
        read_bounded(secret, at_most=3)
    assert why_not_inside(tmp_path, "secret") is None and why_not_inside(tmp_path, "not/there") is None
    assert why_not_inside(tmp_path, None) == "is no path"
