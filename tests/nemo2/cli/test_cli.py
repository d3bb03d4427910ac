# SPDX-License-Identifier: Apache-2.0
"""The commands: what they print, how they end, and what they hand to the launcher. What they refuse: `test_refusals`."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import nemo2.cli
from nemo2 import recipes
from nemo2.base.counts import short_count
from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.cli.adapter import described
from nemo2.cli.app import VERBS
from nemo2.cli.recipe_list import layout_text, matches
from nemo2.config import from_json, to_json
from nemo2.hugging_face.output_folders import new_folder
from nemo2.launch import RunResult
from nemo2.llm.api import validate
from nemo2.mcore.parallel.layout import Layout
from nemo2.models.peft import DoRA, LoRA
from support import odd_folders, saved_checkpoints


def example(words: str) -> str:
    """What stands behind ``nemo2`` in the example of a command's help."""
    return shlex.join(shlex.split(described(VERBS[words])[2])[1:])


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """The launches that commands asked for, none of which happens."""
    requested = []

    def launch(recipe, executor, **settings):
        requested.append(SimpleNamespace(recipe=recipe, executor=executor, **settings))
        return RunResult(status="succeeded", exit_code=0, experiment_id="e", run_dir=tmp_path)

    monkeypatch.setattr("nemo2.launch.launch", launch)
    return requested


def test_every_recipe_is_listed_with_its_facts(command):
    rows = {row["name"]: row for row in command("list --json").json}
    assert set(rows) == set(recipes.names())
    facts = recipes.get("llama3_8b").RECIPE
    assert rows["llama3_8b"]["seq"] == facts.seq_length
    assert rows["llama3_8b"]["gpus"] == facts.nodes * facts.gpus_per_node
    table = command("list").out.splitlines()
    assert table[0].split()[:2] == ["name", "family"] and len(table) == len(rows) + 2
    assert table[-1].startswith("! ")  # what the mark behind a figure means, where a row has it
    assert any("!" in line for line in table[:-1])
    assert "!" not in command("list llama_tiny").out


def test_on_a_terminal_of_80_columns_every_recipe_is_one_line(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    head, *rows, _ = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in command("list").out.splitlines()]
    assert head.split() == ["name", "parameters", "gpus", "GiB", "layout"]
    assert len(rows) == len(recipes.names()) and max(map(len, rows)) <= 80


def test_on_a_terminal_of_80_columns_every_run_is_one_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    folders = [f"nemo_experiments/llama3_8b/2026-01-3{number}_12-00-00" for number in range(2)]
    for folder in folders:
        Path(folder).mkdir(parents=True)
        Path(folder, "environment.json").write_text("{}")
        Path(folder, "metrics.jsonl").write_text(
            '{"step": 11, "reduced_train_loss": 6.5, "val_loss": 6.6, "tokens_per_second": 123456.0}\n'
        )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in (80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        head, *rows = command("runs list").out.splitlines()
        assert max(map(len, [head, *rows])) <= width and {row.split()[-1] for row in rows} == set(folders)
        assert {"name", "steps", "loss", "folder"} <= set(head.split()) and ("best val loss" in head) is (width == 200)


def test_recipes_of_fine_tuning_are_listed_by_the_names_that_commands_take(command):
    rows = {row["name"]: row for row in command("list --finetune llama31_70b --json").json}
    assert {name: row["gpus"] for name, row in rows.items()} == {"llama31_70b:lora": 8, "llama31_70b:full": 32}
    shown = command("show llama31_70b:full --flat").out
    assert "trainer.num_nodes=4\n" in shown and "_target_=nemo2.llm.api.finetune\n" in shown
    command("check llama31_70b:dora --gpus H100")


def test_a_pattern_narrows_the_list(command):
    assert all(row["name"].startswith("llama3_") for row in command("list llama3_* --json").json)


@pytest.mark.parametrize("words", VERBS)
def test_each_help_has_an_example_of_its_own_command(words, command):
    assert example(words).startswith(words)
    assert f"Example: nemo2 {words}" in " ".join(command(f"{words} --help").out.split())


def test_show_prints_the_recipe_with_the_changes(command):
    lines = command(example("show"), "trainer.max_steps=7", "--flat").out.splitlines()
    assert "trainer.max_steps=7" in lines and "trainer.strategy.tensor_model_parallel_size=4" in lines


def test_what_show_writes_as_json_is_the_recipe(tmp_path, command):
    command("show llama_tiny trainer.max_steps=7 --output", tmp_path / "new" / "mine.json")
    recipe = recipes.get("llama_tiny").pretrain_recipe()
    recipe.trainer.max_steps = 7
    assert from_json((tmp_path / "new" / "mine.json").read_text()) == recipe


def test_json_of_show_is_plain_values(command):
    shown = command("show llama_tiny trainer.max_steps=7 --json").json
    assert shown["trainer"]["max_steps"] == 7 and shown["trainer"]["strategy"]["tensor_model_parallel_size"] == 2
    assert "fast_dev_run" not in shown["trainer"]
    assert command("show llama_tiny --json --defaults").json["trainer"]["fast_dev_run"] is False


def test_empty_lists_say_how_they_are_filled(tmp_path, monkeypatch, command):
    monkeypatch.delenv("NEMO2_RECIPES", raising=False)
    monkeypatch.setattr("nemo2.launch.slurm.submission.submissions", lambda: tmp_path)
    assert "nemo2 new-recipe NAME" in command("list --own").out
    assert "--executor CLUSTER" in command("runs list --submitted").out


def test_a_traceback_is_shown_on_request_wherever_the_option_stands(command):
    assert "Traceback" in command("show llama3_8 --debug", code=2).err


def test_pretrain_hands_the_changed_recipe_to_the_launcher(launches, monkeypatch, tmp_path, command):
    monkeypatch.setenv("COLUMNS", "120")  # a worker of pytest's has 80, in which a long path is folded
    told = command(example("pretrain"), "--nodes", 1, "--name", "mine", "--dir", tmp_path, "-n")
    [launch] = launches
    recipe = launch.recipe
    assert (recipe.trainer.max_steps, recipe.optim.config.lr) == (50, 1e-3)
    assert (recipe.log.name, recipe.log.log_dir) == ("mine", str(tmp_path))
    assert (launch.executor, launch.devices, launch.nodes, launch.dryrun) == ("local", 2, 1, True)
    assert f"run directory: {tmp_path}" in told.out
    block = dict(line.split(maxsplit=1) for line in told.err.splitlines() if line.startswith("  "))
    assert block["machine"].startswith("2 processes") and block["layout"] == "TP 2 (SP) · DP 1"
    assert block["parameters"] == "3.67M with a vocabulary of 2,048" and block["writes"] == f"to   {tmp_path}/mine"
    assert block["changed"] == "trainer.max_steps=50 optim.config.lr=1e-3"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("pretrain llama_tiny", "llama_tiny"),
        ("pretrain llama_tiny log.name=mine log.log_dir=/there", "mine"),
        ("pretrain llama_tiny log=default_log(name=a_trial)", "a_trial"),
        ("pretrain llama_tiny log.name=mine --name mine", "mine"),
        ("rehearse llama32_1b:lora --tiny --processes 1", "llama32_1b_lora_tiny"),
    ],
)
def test_a_run_has_the_name_that_a_change_or_an_option_gives_it(launches, command, line, name):
    command(line)
    assert launches[0].recipe.log.name == name
    assert ("/there" in line) is (launches[0].recipe.log.log_dir == "/there")


def test_finetune_hands_the_method_and_the_changes_to_the_launcher(launches, command):
    command(example("finetune"))
    command("finetune llama3_8b peft.dim=4 --packed --name mine")
    command("finetune llama3_8b:full")
    dora, lora, full = (launch.recipe for launch in launches)
    assert isinstance(dora.peft, DoRA) and dora.resume.restore_config.path == "hf:///models/Llama-3-8B"
    assert (lora.peft.dim, isinstance(lora.peft, LoRA), lora.log.name) == (4, True, "mine")
    assert lora.data.packed_sequence_specs.packed_sequence_size == 4096
    assert (full.log.name, getattr(full, "peft", None)) == ("llama3_8b_full", None)


def test_validation_measures_the_named_weights_as_they_describe_themselves(launches, tmp_path, command):
    odd_folders.write(tmp_path / "own")
    command(f"evaluate --from hf://{tmp_path}/own --recipe llama_tiny:lora model.config.rotary_base=7")
    call = launches[0].recipe
    assert call.__fn_or_cls__ is validate and call.resume.restore_config.path == f"hf://{tmp_path}/own"
    assert (call.model.config.vocab_size, call.model.config.rotary_base, call.model_transform) == (331, 7, None)
    assert (call.log.name, call.tokenizer) == ("llama_tiny_lora_validate", "model")


def test_validation_measures_a_run_of_fine_tuning_with_its_adapters_and_tokenizer(launches, tmp_path, command):
    saved_checkpoints.saved(tmp_path / "mine" / "1" / "checkpoints" / "step=3", 3)
    recipe = recipes.get("llama_tiny").finetune_recipe(peft_scheme="lora", name="mine")
    (tmp_path / "mine" / "1" / "recipe.json").write_text(to_json(recipe))
    command("evaluate", tmp_path / "mine")
    call = launches[0].recipe
    assert call.resume.restore_config.path == str(tmp_path / "mine") and call.log.name == "mine_validate"
    assert isinstance(call.model_transform, LoRA) and call.tokenizer == "model"


def test_an_evaluation_of_no_batch_is_refused_before_the_launch(launches, tmp_path, command):
    saved_checkpoints.saved(tmp_path / "runs" / "flat" / "checkpoints" / "step=3", 3)
    recipe = recipes.get("llama_tiny").pretrain_recipe(name="flat")
    recipe.trainer.limit_val_batches = 0
    (tmp_path / "runs" / "flat" / "recipe.json").write_text(to_json(recipe))
    told = command(f"evaluate {tmp_path}/runs/flat", code=2).err
    assert "trainer.limit_val_batches=0: with 0, nothing is measured" in told and not launches
    command(f"evaluate {tmp_path}/runs/flat trainer.limit_val_batches=1")
    assert launches[0].recipe.log.name == "flat_validate"  # also where the run's folder has no folder of its name


def test_validation_without_weights_measures_the_run_that_the_recipe_would_resume(launches, tmp_path, command):
    assert (
        "no run 'llama_tiny' with a checkpoint" in command(f"evaluate --recipe llama_tiny --dir {tmp_path}", code=2).err
    )
    saved_checkpoints.saved(tmp_path / "llama_tiny" / "1" / "checkpoints" / "step=3", 3)
    command(f"evaluate --recipe llama_tiny --dir {tmp_path}")
    call = launches[0].recipe
    assert call.resume.restore_config.path == str(tmp_path / "llama_tiny" / "1" / "checkpoints")
    assert (call.log.name, call.tokenizer) == ("llama_tiny_validate", "data")


@pytest.mark.parametrize(("error", "code"), [(RuntimeFault("rank 1 failed"), 1), (ConfigError("no"), 2)])
def test_the_exit_code_tells_a_failed_run_from_bad_input(monkeypatch, command, error, code):
    def launch(*_, **__):
        raise error

    monkeypatch.setattr("nemo2.launch.launch", launch)
    assert command("pretrain llama_tiny", code=code).err.splitlines()[-1] == f"error: {error}"


@pytest.mark.parametrize("option", ["--json", "--output -"])
def test_completions_are_json_lines_and_nothing_else(option, tmp_path, monkeypatch, command):
    requested = {}
    monkeypatch.setattr("nemo2.llm.api.generate", lambda **options: requested.update(options) or ["text"])
    assert command(f"generate {tmp_path} --prompt a {option}").out == ""
    assert requested["output_path"] == "-" and requested["on_text"] is None


def test_prepare_data_writes_a_tokenizer_and_a_dataset(tmp_path, command):
    (tmp_path / "a.txt").write_text("one two three " * 50)
    (tmp_path / "b.txt").write_text("four five six " * 50)
    line = f"data prepare '{tmp_path}/*.txt' --output {tmp_path}/out/c --train-bpe"
    assert "2 documents" in command(line.replace("out/c", "out/c.bin"), 300).out  # the prefix, as --data takes it
    before = (tmp_path / "out" / "c_tokenizer.json").read_bytes()
    assert "--overwrite" in command(line, 400, code=2).err
    assert (tmp_path / "out" / "c_tokenizer.json").read_bytes() == before
    told = command(line, 300, "--json", "--overwrite").json
    assert told["documents"] == 2 and told["tokens"] > 100 and told["tokenizer"].endswith("c_tokenizer.json")
    for name in ("c.bin", "c.idx", "c.json", "c_tokenizer.json"):
        assert (tmp_path / "out" / name).is_file()


def test_prepared_data_that_were_interrupted_are_prepared_by_the_same_command(tmp_path, command, monkeypatch):
    (tmp_path / "a.txt").write_text("one two three " * 50)
    line = f"data prepare {tmp_path}/a.txt --output {tmp_path}/out/c --train-bpe 300"

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("nemo2.data.prepare.prepare_data", interrupted)
        command(line, code=130)
    assert list((tmp_path / "out").iterdir()) == []
    assert "1 document" in command(line).out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "c.bin",
        "c.idx",
        "c.json",
        "c_tokenizer.json",
    ]


def test_layouts_sizes_and_patterns_as_shown():
    assert layout_text(Layout()) == "dp"
    assert layout_text(Layout(tp=2, pp=4, vp=5, sp=True)) == "tp=2 pp=4 vp=5 sp"
    assert (short_count(8.03e9), short_count(1.5e12), short_count(7)) == ("8.03B", "1.5T", "7")
    assert matches("LLAMA", "llama3_8b") and matches("llama?_8b", "llama3_8b") and not matches("8b*", "llama3_8b")


def test_an_interrupt_while_the_commands_are_imported_ends_without_a_traceback(monkeypatch):
    class Slow(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "nemo2.cli.app", Slow("nemo2.cli.app"))
    assert nemo2.cli.main([]) == 130


def test_a_command_that_is_ended_deletes_what_it_has_half_written(monkeypatch, tmp_path):
    def command(*_, **__):
        with new_folder(tmp_path / "out", 0, overwrite=False, reads=[]):
            assert list(tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("nemo2.cli.app.app", command)
    assert nemo2.cli.main(["export"]) == 143
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) == before
