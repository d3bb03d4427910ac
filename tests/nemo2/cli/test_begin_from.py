# SPDX-License-Identifier: Apache-2.0
"""``--from``: an own model's folder, of sizes that no recipe has, is enough to fine-tune, to export and to load again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo2.base.errors import ConfigError, Nemo2Error
from support import odd_folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "my-model"
    odd_folders.write(folder)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you"}]
    (folder.parent / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 8))
    (folder.parent / "text.txt").write_text("hello, how are you?")
    return folder


def nemo2(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "nemo2", *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.usefixtures("warm_interpreter")
@pytest.mark.parametrize(
    ("peft", "dtype"), [pytest.param("full", "bfloat16", marks=pytest.mark.nightly), ("lora", "float32")]
)
def test_three_commands_from_a_folder_to_a_folder_that_transformers_loads(
    folder: Path, tmp_path: Path, peft: str, dtype: str
) -> None:
    """Merged weights have the base's dtype, whatever the adapters were trained in."""
    import transformers

    shutil.copy(folder.parent / "chats.jsonl", tmp_path)
    folder = shutil.copytree(folder, tmp_path / folder.name)
    released = json.loads((folder / "config.json").read_text()) | {"dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(released))

    runs, exported = tmp_path / "runs", tmp_path / "exported"
    sizes = ["trainer.max_steps=1", "data.global_batch_size=2", "data.seq_length=64", "trainer.limit_val_batches=0"]
    data = str(tmp_path / "chats.jsonl")
    nemo2(
        "finetune", "--from", str(folder), "--data", data, "--peft", peft, "--dir", str(runs), "--devices", "1", *sizes
    )
    nemo2("export", str(runs / folder.name), "--output", str(exported), *["--merge"] * (peft == "lora"))
    described = json.loads((exported / "config.json").read_text())
    assert described.get("dtype", described.get("torch_dtype")) == dtype
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.eos_token_id == [2, 8]
    assert tuple(model.model.embed_tokens.weight.shape) == (331, 48)
    own, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, exported))
    assert type(own) is type(theirs) and own("hello").input_ids == theirs("hello").input_ids


def test_the_folder_decides_the_model_and_a_recipe_the_rest(folder: Path) -> None:
    from nemo2.cli.begin_from import give_weights
    from nemo2.cli.sources import recipe_tree

    recipe = recipe_tree("llama3_8b:lora")
    give_weights(recipe, str(folder))
    assert (recipe.model.config.hidden_size, recipe.model.config.vocab_size) == (48, 331)
    assert recipe.resume.restore_config.path == f"hf://{folder}"
    assert recipe.trainer.num_nodes == recipe_tree("llama3_8b:lora").trainer.num_nodes


def test_a_contradiction_names_both_values_and_both_owners(folder: Path) -> None:
    import fiddle as fdl

    from nemo2.cli.begin_from import described_weights
    from nemo2.hugging_face.released import open_released

    model, _ = described_weights(str(folder))
    model.config.num_layers = 4
    with pytest.raises(Nemo2Error, match="model.config.num_layers=4 where config.json says 3"):
        open_released(folder, fdl.build(model).config)


def test_a_command_without_a_recipe_needs_weights(capsys: pytest.CaptureFixture[str]) -> None:
    from nemo2.cli import main

    assert main(["finetune"]) == 2
    assert "--from FOLDER" in capsys.readouterr().err


def commands_on(folder: str) -> dict[str, str]:
    """What the commands print that use the weights of a folder as they are."""
    import contextlib
    import io

    from nemo2.cli import main
    from support import small_runs

    printed = {}
    for name, words in {
        "generate": ["--prompt", "hello", "--max-new-tokens", "4"],
        "evaluate": ["--text", f"{folder}/../text.txt", "--json"],
        "serve": ["--engine", "transformers", "--print"],
        "serve vllm": ["--engine", "vllm", "--print"],
    }.items():
        small_runs.release()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main([name.split()[0], "--from", folder, *words]) == 0
        printed[name] = out.getvalue()
    return printed


def test_commands_use_released_weights_as_they_are(run_on_ranks: Any, folder: Path) -> None:
    import torch
    import transformers

    model: Any
    (printed,) = run_on_ranks(commands_on, 1, str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("hello", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert printed["generate"].strip() == "hello" + tokenizer.decode(expected, skip_special_tokens=True).rstrip()
    words = (folder.parent / "text.txt").read_text()
    text = tokenizer(tokenizer.eos_token + words, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(text).logits[0, :-1, : len(tokenizer)]  # rows without a token count nowhere
    loss = torch.nn.functional.cross_entropy(logits, text[0, 1:])
    [measured] = json.loads(printed["evaluate"])["texts"].values()
    assert measured["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert printed["serve"].splitlines()[-1].split(" serve ")[1].split()[0] == folder.name
    assert f"serve {folder} " in printed["serve vllm"]
    assert f"--served-model-name {folder.name} " in printed["serve vllm"]


def test_weights_are_named_once(folder: Path) -> None:
    from nemo2.cli.begin_from import named_weights

    assert named_weights(None, str(folder)) == named_weights(str(folder), None) == str(folder)
    assert named_weights(None, "hf://organisation/name") == "hf://organisation/name"
    for both_or_neither in ((str(folder), str(folder)), (None, None)):
        with pytest.raises(ConfigError):
            named_weights(*both_or_neither)


def test_released_weights_without_a_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    from nemo2.hugging_face.checkpoint import Checkpoint

    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "chat_template*"))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Checkpoint.open(tmp_path / "bare").model()
