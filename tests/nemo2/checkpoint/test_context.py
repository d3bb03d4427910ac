# SPDX-License-Identifier: Apache-2.0
"""``context/`` rebuilds model, tokenizer and data without the script that trained them, and runs nothing else."""

import json
import types
from pathlib import Path
from typing import Any

import pytest

from nemo2 import llm
from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
from nemo2.checkpoint.context import load_context, write_context
from nemo2.data import PreTrainingDataModule
from nemo2.data.tokenizer import ByteTokenizer, NullTokenizer
from support import small_chats, small_runs


def trainer(model: Any = None, data: Any = None) -> Any:
    return types.SimpleNamespace(lightning_module=model, datamodule=data)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    data = small_runs.random_bytes()
    model = small_runs.build_llama(vocab_size=None, hidden_dropout=0.25)
    model.tokenizer = data.tokenizer
    write_context(tmp_path, trainer(model, data))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / ".metadata").touch()  # of which these tests read nothing
    return tmp_path


def test_every_part_is_there_as_json_and_nothing_as_pickle(checkpoint):
    names = {path.name for path in (checkpoint / "context").iterdir()}
    assert names == {"model.json", "tokenizer.json", "data.json", "optim.json", "missing.json"}
    for name in names:
        json.loads((checkpoint / "context" / name).read_text())


def test_the_model_is_built_as_it_was_described(checkpoint):
    model = load_context(checkpoint, "model")
    assert type(model).__name__ == "LlamaModel"
    for name, value in small_runs.MODEL.items():
        assert getattr(model.config, name) == (None if name == "vocab_size" else value), name
    assert model.config.hidden_dropout == 0.25
    assert load_context(checkpoint / "context", "model").config.num_layers == model.config.num_layers


def test_the_stages_in_a_hybrid_s_pattern_are_left_to_the_layout_of_whoever_reads_the_model(tmp_path):
    config = llm.SSMConfig(num_layers=4, hybrid_override_pattern="M*|M-", hidden_size=64, vocab_size=128)
    write_context(tmp_path, trainer(llm.MambaModel(config)))
    assert '"M*|M-"' in (tmp_path / "context" / "model.json").read_text()
    assert load_context(tmp_path, "model").config.hybrid_override_pattern == "M*M-"


def test_tokenizer_and_data_are_built_too_or_read_as_editable_configs(checkpoint):
    assert load_context(checkpoint, "tokenizer").text_to_ids("ab") == [97, 98]
    config = load_context(checkpoint, "data", build=False)
    config.global_batch_size = 16
    import fiddle

    data = fiddle.build(config)
    assert (data.seq_length, data.global_batch_size) == (small_runs.SEQ, 16)
    assert load_context(checkpoint, "optim").config.lr == 1e-2


def test_data_that_were_changed_after_they_were_made_are_described_as_they_are(tmp_path):
    data = PreTrainingDataModule(["a"], seq_length=8)
    data.paths = ["b"]
    write_context(tmp_path, trainer(data=data))
    assert load_context(tmp_path, "data", build=False).paths == ["b"]
    data.paths = Plain()  # pyright: ignore[reportAttributeAccessIssue]
    write_context(tmp_path / "told", trainer(data=data))
    with pytest.raises(CheckpointError, match=r"does not describe the data: .*Plain"):
        load_context(tmp_path / "told", "data")


class Plain:
    """Doesn't say how it was made."""


def test_what_cannot_be_described_is_named_with_the_reason(tmp_path):
    write_context(tmp_path, trainer(Plain()))
    with pytest.raises(CheckpointError, match=r"does not describe the model: .*Plain"):
        load_context(tmp_path, "model")
    with pytest.raises(CheckpointError, match="does not describe the data: the run had none"):
        load_context(tmp_path, "data")
    with pytest.raises(CheckpointError, match="does not describe the model: this file does not exist"):
        load_context(tmp_path / "nowhere", "model")


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("subprocess", "Popen"), ("builtins", "eval"), ("torch", "load"), ("nemo2.checkpoint.io", "os.system")],
)  # fmt: skip
def test_a_context_that_names_something_dangerous_is_refused_and_runs_nothing(checkpoint, module, name):
    marker = checkpoint / "marker"
    file = checkpoint / "context" / "model.json"
    text = file.read_text()
    model_class = '"module": "nemo2.models.llama",\n    "name": "LlamaModel"'
    evil = json.loads(text)
    found = [node for node in _nodes(evil) if node.get("name") == "LlamaModel"]
    assert found, model_class
    for node in found:
        node["module"], node["name"] = module, name
    file.write_text(json.dumps(evil).replace(str(small_runs.SEQ), f'"touch {marker}"', 1))
    with pytest.raises(SecurityError):
        load_context(checkpoint, "model")
    assert not marker.exists()


def _nodes(tree: Any) -> list[dict[str, Any]]:
    if isinstance(tree, dict):
        return [tree, *(node for value in tree.values() for node in _nodes(value))]
    if isinstance(tree, list):
        return [node for value in tree for node in _nodes(value)]
    return []


def restored(checkpoint: Path, own: Any, *, data_too: bool = True, **options: Any) -> tuple[Any, Any]:
    """The tokenizers of the model and of the data of a run that starts from the weights of ``checkpoint``."""
    model = types.SimpleNamespace(tokenizer=own)
    data = types.SimpleNamespace(tokenizer=own if data_too else None)
    run: Any = types.SimpleNamespace(
        checkpoint_callback=None, default_root_dir="/nowhere", ckpt_path=None, max_steps=1,
        strategy=types.SimpleNamespace(restore_config=None),
    )  # fmt: skip
    resume = AutoResume(restore_config=RestoreConfig(path=str(checkpoint), **options))
    resume.setup(run, model, data=data)  # pyright: ignore[reportArgumentType]
    return model.tokenizer, data.tokenizer


def test_the_tokenizer_of_the_weights_to_start_from_becomes_the_models_and_the_shared_one_of_the_data(
    checkpoint, caplog
):
    own = NullTokenizer(7)
    model, data = restored(checkpoint, own)
    assert isinstance(model, ByteTokenizer) and data is model
    assert "ByteTokenizer(), replaces the run's own tokenizer, NullTokenizer(7)" in caplog.text
    model, data = restored(checkpoint, own, data_too=False)
    assert isinstance(model, ByteTokenizer) and data is None
    assert isinstance(restored(checkpoint, None)[1], ByteTokenizer)
    assert restored(checkpoint, own, load_artifacts=False) == (own, own)
    same = ByteTokenizer()
    assert restored(checkpoint, same)[0] is same


def test_a_checkpoint_without_a_tokenizer_leaves_the_runs_and_a_dangerous_one_is_refused(checkpoint):
    own = NullTokenizer(7)
    file = checkpoint / "context" / "tokenizer.json"
    text = file.read_text()
    file.unlink()
    assert restored(checkpoint, own) == (own, own)
    config = json.loads(text)
    for node in _nodes(config):
        if node.get("name") == "ByteTokenizer":
            node["module"], node["name"] = "os", "system"
    file.write_text(json.dumps(config))
    with pytest.raises(SecurityError, match=r"load_artifacts=True: .*os.*load_artifacts=False"):
        restored(checkpoint, own)
    assert restored(checkpoint, own, load_artifacts=False) == (own, own)


def test_a_checkpoint_of_nemo_2_gives_its_tokenizer_too(tmp_path):
    small_chats.make_tokenizer(tmp_path / "context" / "nemo_tokenizer")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / ".metadata").touch()
    model, data = restored(tmp_path, NullTokenizer(7))
    assert data is model and str(model.pretrained_model_name) == str(tmp_path / "context" / "nemo_tokenizer")
