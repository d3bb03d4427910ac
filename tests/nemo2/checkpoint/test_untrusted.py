# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that wants to run something is refused, and nothing of it is run; every door is first shown to be one."""

import contextlib
import io
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.checkpoint.metadata import read_metadata
from nemo2.checkpoint.untrusted import data_only, refuse_code_in_extra_states
from support import small_runs
from support.foreign_checkpoints import Bomb

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "it-ran"


def saved(folder: Path, state: dict[str, Any]) -> Path:
    save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_metadata_that_runs_something_is_refused_and_torch_alone_would_run_it(tmp_path, marker):
    weights = saved(tmp_path / "weights", {"x": torch.ones(3)})
    assert list(read_metadata(weights).state_dict_metadata) == ["x"]
    (weights / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(SecurityError, match=r"weights: \.metadata names (posix|nt)\.mkdir.*ran none of it"):
        read_metadata(weights)
    with data_only(), pytest.raises(SecurityError):
        FileSystemReader(weights).read_metadata()
    assert not marker.exists()
    with contextlib.suppress(AttributeError):  # what comes out of it is no metadata, but by then it has run
        FileSystemReader(weights).read_metadata()
    assert marker.exists(), "the test's bomb is none"


@pytest.mark.parametrize(
    "name", ["getattr", "eval", "torch.load", "os.system", "torch.distributed.checkpoint.metadata.os"]
)
def test_metadata_may_name_nothing_but_its_parts(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    weights = tmp_path / "weights"
    weights.mkdir()
    # Protocol 4 by hand: names can be written that pickle itself wouldn't.
    parts = b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module or "builtins", attribute)
    )
    (weights / ".metadata").write_bytes(pickle.PROTO + b"\x04" + parts + pickle.STACK_GLOBAL + pickle.STOP)
    with pytest.raises(SecurityError, match=rf"names {module or 'builtins'}\.{attribute}"):
        read_metadata(weights)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04"])
def test_metadata_that_is_garbage_is_a_named_error(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_metadata(tmp_path)


def test_metadata_of_a_newer_torch_is_read(tmp_path, monkeypatch):
    """torch 2.15 pickles a value more than 2.13, which can't read it."""
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self), "new"))
    weights = saved(tmp_path / "weights", {"x": torch.ones(3, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointException, match="too many values"):
        load({"x": torch.zeros(3, dtype=torch.bfloat16)}, checkpoint_id=str(weights), no_dist=True)
    assert type(read_metadata(weights).state_dict_metadata["x"].properties) is TensorProperties
    target = torch.zeros(3, dtype=torch.bfloat16)
    with data_only():
        load({"x": target}, checkpoint_id=str(weights), no_dist=True)
    assert target.tolist() == [1, 1, 1]


def test_an_object_in_a_shard_that_runs_something_is_refused_and_torch_alone_would_run_it(tmp_path, marker):
    weights = saved(tmp_path / "weights", {"x": Bomb(marker)})
    with data_only() as refused, pytest.raises(CheckpointException):
        load({"x": None}, checkpoint_id=str(weights), no_dist=True)
    assert "could run code" in str(refused[0]) and "mkdir" in str(refused[0])
    assert not marker.exists()
    load({"x": None}, checkpoint_id=str(weights), no_dist=True)
    assert marker.exists(), "the test's bomb is none"


def test_asking_torch_for_unsafe_loading_is_of_no_use(tmp_path, marker):
    torch.save(Bomb(marker), tmp_path / "common.pt")
    with data_only(), pytest.raises(SecurityError, match="could run code"):
        torch.load(tmp_path / "common.pt", weights_only=False)
    assert not marker.exists()


@pytest.mark.parametrize("value", ["1", "true"])
def test_an_environment_that_turns_safe_loading_off_is_refused(monkeypatch, value):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", value)
    with pytest.raises(SecurityError, match="Unset this variable"), data_only():
        pass


def test_torch_is_as_it_was_afterwards():
    before = torch.load
    with data_only():
        assert torch.load is not before
    assert torch.load is before
    assert isinstance(filesystem.pickle, types.ModuleType)


def resumed_from_malicious_files(directory: str) -> dict[str, str]:
    """A checkpoint of ours whose files somebody has replaced, manifest and all."""
    keep = small_runs.keep(directory, filename="good-{step}")
    small_runs.fit(small_runs.build_llama(), max_steps=1, callbacks=[keep])
    checkpoint, answers = Path(directory) / "good-step=1", {}
    (checkpoint / "manifest.json").unlink()
    small_runs.fit(small_runs.build_llama(), max_steps=2, ckpt_path=str(checkpoint))  # without a manifest it does load
    for name in (".metadata", "common.pt"):
        file = checkpoint / "weights" / name
        content = file.read_bytes() if file.exists() else None
        if name == ".metadata":
            file.write_bytes(pickle.dumps(Bomb(Path(directory) / "it-ran")))
        else:
            torch.save({"global_step": Bomb(Path(directory) / "it-ran")}, file)
        try:
            small_runs.fit(small_runs.build_llama(), max_steps=2, ckpt_path=str(checkpoint))
        except SecurityError as error:
            answers[name] = str(error)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
    return answers


def test_resuming_from_a_malicious_checkpoint_is_refused_and_runs_nothing(run_on_ranks, tmp_path, marker):
    answers = run_on_ranks(resumed_from_malicious_files, 1, str(tmp_path))[0]
    assert answers.keys() == {".metadata", "common.pt"}
    for answer in answers.values():
        assert answer.startswith(str(tmp_path / "good-step=1"))  # the checkpoint, whichever reader meets the file first
        assert "could run code" in answer and "ran none of it" in answer
    assert not marker.exists()


def extra_state(value: Any) -> dict[str, Any]:
    """As Transformer Engine keeps it: a pickle in a tensor of bytes, deep in what was loaded."""
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return {"model": {"layers": [{"linear._extra_state": content}], "linear.weight": torch.ones(2)}}


class Recipe:
    """Stands for one of Transformer Engine's, under whose name it is pickled."""

    def __init__(self) -> None:
        self.margin = 0


def test_an_fp8_state_that_runs_something_is_refused_and_transformer_engine_would_run_it(marker):
    bombs = [Bomb(marker), {"recipe": Bomb(marker)}, {"scale": [Bomb(marker)]}]
    for bomb in bombs:
        with pytest.raises(SecurityError, match=r"linear\._extra_state names (posix|nt)\.mkdir"):
            refuse_code_in_extra_states(extra_state(bomb))
    with pytest.raises(SecurityError, match="holds an object that claims to be a tensor"):
        refuse_code_in_extra_states(extra_state(StorageBomb(marker)))
    assert not marker.exists()
    bombs = [Bomb(marker)]
    if torch.storage._load_from_bytes.__module__ == "torch.storage":  # Megatron-Core 0.18 replaced it by a safe one
        bombs.append(StorageBomb(marker))
    for bomb in bombs:
        state = extra_state(bomb)["model"]["layers"][0]["linear._extra_state"]
        pickle.loads(state.numpy().tobytes())  # as Transformer Engine does
        assert marker.exists(), "the test's bomb is none"
        marker.rmdir()


class StorageBomb:
    """A tensor's storage whose own archive is a pickle that runs something."""

    def __init__(self, marker: Path) -> None:
        file = io.BytesIO()
        torch.save(Bomb(marker), file)
        self.content = file.getvalue()

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.content,)


def test_an_fp8_state_of_tensors_and_recipes_is_let_through(monkeypatch):
    module: Any = types.ModuleType("transformer_engine.common.recipe")
    module.Recipe = Recipe
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Recipe, "__module__", module.__name__)
    state = {
        "recipe": Recipe(),
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.zeros(4, 3, dtype=torch.float32),
        "extra_fp8_variables": {"num_gemms": 1, "fp8_checkpoint": True, "dtype": torch.bfloat16},
    }
    refuse_code_in_extra_states(extra_state(state))
    refuse_code_in_extra_states({"a._extra_state": torch.empty(0, dtype=torch.uint8), "b._extra_state": None})


def test_an_fp8_state_of_garbage_is_refused():
    with pytest.raises(SecurityError, match="a._extra_state cannot be read as plain data"):
        refuse_code_in_extra_states({"a._extra_state": torch.ones(9, dtype=torch.uint8)})
