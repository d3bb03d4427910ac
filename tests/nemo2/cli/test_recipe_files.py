# SPDX-License-Identifier: Apache-2.0
"""A recipe in YAML on the command line: written by `show --yaml`, edited, and taken wherever a name is."""

from pathlib import Path

import pytest
import yaml

from nemo2.cli.sources import name_of_run, recipe_tree


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_show_writes_is_the_recipe_with_its_changes(command):
    Path("run.yaml").write_text(command("show llama_tiny trainer.max_steps=7 --yaml").out)
    shown = command("show run.yaml optim.config.lr=1e-4 --json").json
    assert shown["trainer"]["max_steps"] == 7 and shown["optim"]["config"]["lr"] == 1e-4
    expected = recipe_tree("llama_tiny")
    expected.trainer.max_steps = 7
    assert recipe_tree("run.yaml") == expected


def test_changes_of_a_recipe_by_name(command):
    Path("small.yaml").write_text(
        "recipe: llama_tiny\ntrainer:\n  max_steps: 7\nstrategy.tensor_model_parallel_size: 1\n"
    )
    made = recipe_tree("small.yaml")
    assert made.trainer.max_steps == 7 and made.trainer.strategy.tensor_model_parallel_size == 1
    assert name_of_run("small.yaml", made) == "small"
    Path("small.yaml").write_text("recipe: llama_tiny\nlog:\n  name: mine\n")
    assert name_of_run("small.yaml", recipe_tree("small.yaml")) == "mine"
    command("check small.yaml trainer.max_steps=5")
    assert "nemo_experiments/other" in command("pretrain small.yaml --dryrun --name other").err


def test_its_mode_and_its_method():
    Path("fast.yaml").write_text("recipe: llama3_8b\nperformance: true\n")
    assert recipe_tree("fast.yaml") == recipe_tree("llama3_8b", performance=True)
    Path("dora.yaml").write_text("recipe: llama3_8b:dora\npeft: {dim: 4}\n")
    made = recipe_tree("dora.yaml")
    assert type(made.peft).__name__ == "Config" and made.peft.dim == 4 and made.peft.__fn_or_cls__.__name__ == "DoRA"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("recipe: llama_tiny\ntrainer:\n  max_stepz: 7", "show run.yaml", "run.yaml:3: trainer.max_stepz=7"),
        ("recipe: no_such", "show run.yaml", "no_such"),
        ("recipe: own.py", "show run.yaml", "run.yaml:1: recipe: own.py: must be a name of `nemo2 list`"),
        ("recipe: [a]", "show run.yaml", "run.yaml:1: recipe: ['a']: must be a name of `nemo2 list`"),
        ("recipe: llama_tiny\nperformance: 1", "show run.yaml", "run.yaml:2: performance: takes true or false"),
        ("recipe: llama3_8b:dora", "finetune run.yaml --peft lora", "run.yaml sets dora, and --peft sets lora"),
        (
            "recipe: llama3_8b:dora",
            "show run.yaml:lora",
            "asks for the method lora, but run.yaml names the recipe llama3_8b:dora",
        ),
        ("recipe: a\nrecipe: b", "show run.yaml", "the key 'recipe' occurs twice"),
        ("model: {_target_: os.system}", "show run.yaml", "names os.system"),
        ("recipe: llama_tiny\nmodel: {_target_: os.system}", "show run.yaml", "names os.system"),
        ("_target_: nemo2.llm.api.generate\npath: x", "show run.yaml", "describes a call of generate"),
        ("just: text", "show run.yaml", "a recipe in YAML must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_message(text, line, words, command):
    Path("own.py").write_text("raise SystemExit('imported')")
    Path("run.yaml").write_text(text)
    told = " ".join(command(line, code=2).err.split())
    assert words in told and "Traceback" not in told


def test_a_file_with_every_setting_is_not_made_to_order(command):
    text = command("show llama_tiny --yaml").out
    Path("run.yml").write_text(text)
    assert "_target_" in yaml.safe_load(text)
    assert "--performance: run.yml already sets every field" in command("show run.yml --performance", code=2).err
