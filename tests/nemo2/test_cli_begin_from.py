# SPDX-License-Identifier: Apache-2.0
"""``--from``: an own model's folder, of sizes that no recipe has, is enough to fine-tune, to export and to load again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo2.errors import ConfigError, Nemo2Error
from support import released_models

ODD = {"vocab_size": 331, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "eos_token_id": [2, 8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("own") / "my-model"
    released_models.write("llama", folder, **ODD)
    alphabet = ["<pad>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you"}]
    (folder.parent / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 8))
    return folder


def nemo2(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "nemo2", *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.timeout(900)  # three processes that import everything
def test_three_commands_from_a_folder_to_a_folder_that_transformers_loads(folder: Path, tmp_path: Path) -> None:
    import transformers

    runs, exported = tmp_path / "runs", tmp_path / "exported"
    sizes = ["trainer.max_steps=1", "data.global_batch_size=2", "data.seq_length=64", "trainer.limit_val_batches=0"]
    data = str(folder.parent / "chats.jsonl")
    nemo2(
        "finetune",
        "--from",
        str(folder),
        "--data",
        data,
        "--peft",
        "full",
        "--dir",
        str(runs),
        "--devices",
        "1",
        *sizes,
    )
    nemo2("export", str(runs / folder.name), "--output", str(exported))
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


def test_a_command_without_a_recipe_needs_weights() -> None:
    from nemo2.cli.runs import _refuse_without_recipe

    with pytest.raises(ConfigError, match="--from"):
        _refuse_without_recipe(None, None, False)
