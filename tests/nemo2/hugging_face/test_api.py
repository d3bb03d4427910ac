# SPDX-License-Identifier: Apache-2.0
"""Weights in and out as a user moves them: by command, `llm.import_ckpt` and `llm.export_ckpt`; transformers is the judge."""

import json
import shutil
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import nemo2 as nl
from nemo2 import llm
from nemo2.base.errors import CheckpointError, ConfigError, OutputExists, SecurityError
from nemo2.checkpoint.context import load_context
from nemo2.cli.app import app
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.identify import identify
from support import resharding
from support.foreign_checkpoints import MODEL_YAML, torch_dist

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "vocab_size": 64,
}

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def make_tokenizer(folder: Path, words: int = 64) -> None:
    """A tokenizer of so many words with a chat template, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(words - 3))]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it, with its tokenizer, a way to generate, and what is none of ours."""
    folder = tmp_path_factory.mktemp("released") / "tiny"
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.generation_config.update(temperature=0.7, top_p=0.9, do_sample=True, eos_token_id=[2, 5])
    model.save_pretrained(folder)
    make_tokenizer(folder)
    (folder / "README.md").write_text("A card.\n")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a folder was run')\n")
    return folder


@pytest.fixture(scope="module")
def imported(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llm.import_ckpt(None, f"hf://{released}", tmp_path_factory.mktemp("imported") / "tiny")


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def logits(folder: Path) -> torch.Tensor:
    """Of transformers' model, which must miss nothing and know all."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12)).logits


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Of what is no weight and no config.json."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".safetensors", ".py", ".md"))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files if file.name != "config.json"}


def test_by_command_weights_go_in_and_come_out_the_same(released: Path, tmp_path: Path) -> None:
    said = run("import", released, "--output", tmp_path / "in")
    assert f"resume.restore_config.path={tmp_path / 'in'}" in said
    said = run("show", tmp_path / "in", "--verify")
    assert "whole       yes" in said and f"nemo2 export {tmp_path / 'in'} --output" in said
    run("export", tmp_path / "in", "--output", tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(released))
    assert bytes_of(tmp_path / "out") == bytes_of(released)
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= bytes_of(released).keys()
    assert not list((tmp_path / "out").glob("*.py")) + list((tmp_path / "out").glob("*.md"))


def test_the_chat_template_is_the_runs_and_comes_out_again(released: Path, imported: Path, tmp_path: Path) -> None:
    tokenizer = load_context(imported, "tokenizer")
    assert tokenizer.text_to_ids("w3 w0 </s>") == [6, 3, 2] and (tokenizer.vocab_size, tokenizer.eos_id) == (64, 2)
    chat = [{"role": "user", "content": "w1"}]
    assert tokenizer.tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>w1</s>"

    out = llm.export_ckpt(imported, output_path=tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False) == "<|user|>w1</s>"


def test_an_export_stands_beside_its_checkpoint_and_is_replaced_only_where_it_is_asked_for(
    released: Path, tmp_path: Path
) -> None:
    target = llm.import_ckpt(None, str(released), tmp_path / "in")
    with pytest.raises(OutputExists, match="overwrite=True"):
        llm.import_ckpt(None, str(released), target)
    llm.import_ckpt(None, str(released), target, overwrite=True)
    assert llm.export_ckpt(target) == target / "hf", "NeMo's default"
    with pytest.raises(OutputExists, match="overwrite=True"):
        llm.export_ckpt(target)
    assert identify(target, verify=True).problems == []


def test_an_import_deletes_what_a_killed_one_of_the_same_target_left(released: Path, tmp_path: Path) -> None:
    from nemo2.base.files import locked
    from nemo2.checkpoint.directory import temporary_name

    left, written, other = (temporary_name(tmp_path / name) for name in ("x", "x", "other-x"))
    for folder in (left, written, other):
        folder.mkdir()
    with locked(written):
        llm.import_ckpt(source=released, output_path=tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"x", written.name, other.name}


def test_models_without_a_place_are_kept_where_nemo_keeps_them(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_MODELS_CACHE", str(tmp_path / "cache"))
    first = llm.import_ckpt(None, f"hf://{released}")
    assert first == tmp_path / "cache" / "tiny"
    saved = (first / "manifest.json").stat().st_mtime_ns
    assert llm.import_ckpt(None, f"hf://{released}") == first
    assert (first / "manifest.json").stat().st_mtime_ns == saved, "one that is there is not imported again"
    assert torch.equal(logits(llm.export_ckpt("nemo://tiny", "hf", tmp_path / "out")), logits(released))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    named = llm.import_ckpt(None, str(released), tmp_path / "cache" / "a" / "tiny")
    assert llm.import_ckpt(None, "hf://a/tiny") == named
    with pytest.raises(CheckpointError, match="hf://a/tiny@v2 cannot be downloaded"):  # other weights than those
        llm.import_ckpt(None, "hf://a/tiny@v2")
    connector = llm.load_connector_from_trainer_ckpt(first, "hf")
    assert torch.equal(logits(connector(tmp_path / "again")), logits(released))


def test_a_model_that_is_named_must_be_the_one_of_the_weights(released: Path, tmp_path: Path) -> None:
    config = llm.LlamaConfig(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, seq_length=16)
    with pytest.raises(CheckpointError, match=r"model.layers.2.*missing"):
        llm.import_ckpt(llm.LlamaModel(config), str(released), tmp_path / "in")
    with pytest.raises(ConfigError, match="target='hff': must be one of 'hf'"):
        llm.export_ckpt(tmp_path, "hff")
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_configuration_with_other_layers_than_the_checkpoint_is_blamed_and_no_damage(
    released: Path, tmp_path: Path, num_layers: int
) -> None:
    place = llm.import_ckpt(None, str(released), tmp_path / "in")
    config = llm.io.load_context(place, "model.config")
    config.num_layers = num_layers
    with pytest.raises(
        CheckpointError, match=rf"that the configuration describes: .*has shape \[2, .*and \[{num_layers}, "
    ):
        llm.export_ckpt(place, "hf", tmp_path / "out", model=config)


def test_a_class_in_place_of_a_configuration_names_the_family_alone(released: Path, tmp_path: Path) -> None:
    place = llm.import_ckpt(llm.LlamaModel(config=llm.Llama2Config7B), str(released), tmp_path / "in")  # pyright: ignore
    assert Checkpoint.open(place).model().config.num_layers == 2


def test_a_tokenizer_that_leads_out_of_its_folder_is_refused(released: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(released, tmp_path / "released")
    (tmp_path / "secret").write_text("{}")
    (folder / "added_tokens.json").symlink_to(tmp_path / "secret")
    with pytest.raises(SecurityError, match=r"added_tokens.json"):
        llm.import_ckpt(None, str(folder), tmp_path / "in")


def test_a_tokenizer_with_code_of_its_own_stays_behind_and_is_said(
    released: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(released, tmp_path / "released")
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "TinyTokenizer", "auto_map": {"AutoTokenizer": ["modeling_tiny.Tiny", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    target = llm.import_ckpt(None, str(folder), tmp_path / "in")
    assert "nemo2 runs no code of a folder" in caplog.text
    out = llm.export_ckpt(target, output_path=tmp_path / "out")
    assert torch.equal(logits(out), logits(released)) and not (out / "tokenizer_config.json").exists()
    assert "has no tokenizer" in caplog.text


def of_nemo(imported: Path, folder: Path, **changes: Any) -> Path:
    """The weights of a checkpoint of ours as NeMo 2.0 leaves them."""
    torch_dist(
        folder / "weights", **resharding.whole_tensors(imported), **{"optimizer.state.exp_avg.module.w": torch.ones(2)}
    )
    (folder / "context" / "nemo_tokenizer").mkdir(parents=True)
    for name, content in bytes_of(imported / "context" / "tokenizer").items():
        (folder / "context" / "nemo_tokenizer" / name).write_bytes(content)
    more = "vocab_size: 64\n  share_embeddings_and_output_weights: false\n  layernorm_epsilon: 1.0e-06"
    text = MODEL_YAML.replace("vocab_size: 64", more)
    for old, new in changes.items():
        text = text.replace(old, new)
    (folder / "context" / "model.yaml").write_text(text)
    return folder


def test_a_nemo_checkpoint_is_imported_and_exported(released: Path, imported: Path, tmp_path: Path) -> None:
    nemo = of_nemo(imported, tmp_path / "nemo--step=3")
    commands = identify(nemo).commands
    assert [line.split()[1] for line in commands] == ["translate", "pretrain", "import", "export"]
    run("import", nemo, "--output", tmp_path / "ours")
    assert identify(tmp_path / "ours", verify=True).problems == []
    for number, source in enumerate((nemo, tmp_path / "ours")):
        run("export", source, "--output", tmp_path / f"out{number}")
        assert torch.equal(logits(tmp_path / f"out{number}"), logits(released))
        assert bytes_of(tmp_path / f"out{number}") == bytes_of(released)


def test_what_was_imported_into_a_model_that_names_no_length_can_be_used(released: Path, tmp_path: Path) -> None:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")
    config = Checkpoint.open(llm.import_ckpt(None, f"hf://{released}", tmp_path / "by-itself")).model().config
    sizes = {name: getattr(config, name) for name in names}
    model = llm.LlamaModel(llm.LlamaConfig(**sizes, share_embeddings_and_output_weights=False))
    target = llm.import_ckpt(model, f"hf://{released}", tmp_path / "named")
    assert not (target / "context" / "data.json").exists(), "an import has none"
    assert Checkpoint.open(target).model().config.hidden_size == config.hidden_size


def test_a_nemo_checkpoint_tells_of_its_model_by_nemos_own_call(imported: Path, tmp_path: Path) -> None:
    nemo = of_nemo(imported, tmp_path / "run" / "nemo--step=3")
    for place in (nemo, nemo / "context", nemo.parent):
        model = nl.io.load_context(place, subpath="model")
        assert isinstance(model, llm.LlamaModel) and model.config.num_layers == 2
        assert model.tokenizer.vocab_size == nl.io.load_context(place, "model.tokenizer").vocab_size
    whole = nl.io.load_context(nemo)
    assert whole.model.config.hidden_size == nl.io.load_context(nemo, "model.config").hidden_size and whole.extra == {}
    with pytest.raises(CheckpointError, match="but not 'optim'. `nemo2 translate"):
        nl.io.load_context(nemo, "optim")
    described = nl.io.load_context(nemo, "model", build=False)
    described.config.num_layers = 4
    assert fdl.build(described).config.num_layers == 4


def test_a_nemo_checkpoint_that_names_code_is_refused(imported: Path, tmp_path: Path) -> None:
    nemo = of_nemo(imported, tmp_path / "nemo", **{"nemo.collections.llm.gpt.model.llama.LlamaConfig": "os.system"})
    with pytest.raises(SecurityError, match="only NeMo's language models"):
        llm.import_ckpt(None, str(nemo), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_megatron_lms_checkpoint_needs_its_model_named(released: Path, imported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "megatron"
    tensors = {name.removeprefix("module."): tensor for name, tensor in resharding.whole_tensors(imported).items()}
    torch_dist(folder / "iter_0000010", **tensors, **{"optimizer.state.exp_avg.w": torch.ones(2)})
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    with pytest.raises(ConfigError, match="does not describe its model"):
        llm.import_ckpt(None, str(folder), tmp_path / "ours")
    model = load_context(imported, "model")
    ours = llm.import_ckpt(model, str(folder), tmp_path / "ours")
    for number, source in enumerate((folder, ours)):
        out = llm.export_ckpt(source, output_path=tmp_path / f"out{number}", model=model)
        assert torch.equal(logits(out), logits(released))
    assert "--recipe RECIPE" in identify(folder).commands[0]
