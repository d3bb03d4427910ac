# SPDX-License-Identifier: Apache-2.0
"""The commands: what they print, how they end, and that listing is cheap."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemo2 import recipes
from nemo2.base.columns import short_count
from nemo2.cli.adapter import described
from nemo2.cli.app import VERBS, main
from nemo2.cli.recipe_list import layout_text, matches
from nemo2.errors import ConfigError, RuntimeFault
from nemo2.mcore.parallel.layout import Layout


def example(words: str) -> list[str]:
    """The words behind ``nemo2`` of the example in a command's help."""
    return shlex.split(described(VERBS[words])[2])[1:]


def test_list_and_help_load_neither_torch_nor_nemo_run():
    code = (
        "import sys; from nemo2.cli import main; a = main(['--help']); b = main(['list']);"
        "sys.exit(a or b or any(m in sys.modules for m in ('torch', 'nemo_run', 'lightning', 'fiddle')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, stdout=subprocess.DEVNULL).returncode == 0


def test_the_script_of_a_launch_which_every_rank_imports_loads_no_command():
    code = "import sys; from nemo2.cli import script; sys.exit(any(m.startswith('nemo2.cli.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_recipe_is_listed_with_its_facts(capsys):
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(recipes.names())
    facts = recipes.get("llama3_8b").RECIPE
    assert rows["llama3_8b"]["seq"] == facts.seq_length
    assert rows["llama3_8b"]["gpus"] == facts.nodes * facts.gpus_per_node
    assert main(["list"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["name", "family"] and len(table) == len(rows) + 2
    assert table[-1].startswith("! ")  # what the mark behind a figure means, where a row has it
    assert any("!" in line for line in table[:-1])
    assert main(["list", "llama_tiny"]) == 0 and "!" not in capsys.readouterr().out


def test_on_a_terminal_of_80_columns_every_recipe_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["list"]) == 0
    head, *rows, _ = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert head.split() == ["name", "parameters", "gpus", "GiB", "layout"]
    assert len(rows) == len(recipes.names()) and max(map(len, rows)) <= 80


def test_on_a_terminal_of_80_columns_every_run_is_one_line(tmp_path, monkeypatch, capsys):
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
        assert main(["runs", "list"]) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert max(map(len, [head, *rows])) <= width and {row.split()[-1] for row in rows} == set(folders)
        assert {"name", "steps", "loss", "folder"} <= set(head.split()) and ("best val loss" in head) is (width == 200)


def test_recipes_of_fine_tuning_are_listed_by_the_names_that_commands_take(capsys):
    assert main(["list", "--finetune", "llama31_70b", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["gpus"] for name, row in rows.items()} == {"llama31_70b:lora": 8, "llama31_70b:full": 32}
    assert main(["show", "llama31_70b:full", "--flat"]) == 0
    shown = capsys.readouterr().out
    assert "trainer.num_nodes=4\n" in shown and "_target_=nemo2.llm.api.finetune\n" in shown
    assert main(["check", "llama31_70b:dora", "--gpus", "H100"]) == 0


def test_a_pattern_narrows_the_list_and_one_without_a_match_is_an_error(capsys):
    assert main(["list", "llama3_*", "--json"]) == 0
    assert all(row["name"].startswith("llama3_") for row in json.loads(capsys.readouterr().out))
    assert main(["list", "llama9_8b"]) == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("command", VERBS)
def test_each_help_has_an_example_of_its_own_command(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    words = command.split()
    assert example(command)[: len(words)] == words and f"Example: nemo2 {command}" in text


def test_show_prints_the_recipe_with_the_changes(capsys):
    assert main([*example("show"), "trainer.max_steps=7", "--flat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "trainer.max_steps=7" in lines and "trainer.strategy.tensor_model_parallel_size=4" in lines


def test_what_show_writes_as_json_is_the_recipe(tmp_path):
    from nemo2.config import from_json

    assert main(["show", "llama_tiny", "trainer.max_steps=7", "--output", str(tmp_path / "new" / "mine.json")]) == 0
    loaded = from_json((tmp_path / "new" / "mine.json").read_text())
    recipe = recipes.get("llama_tiny").pretrain_recipe()
    recipe.trainer.max_steps = 7
    assert loaded == recipe


def test_json_of_show_is_plain_values(capsys):
    assert main(["show", "llama_tiny", "trainer.max_steps=7", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["trainer"]["max_steps"] == 7 and shown["trainer"]["strategy"]["tensor_model_parallel_size"] == 2
    assert "fast_dev_run" not in shown["trainer"]
    assert main(["show", "llama_tiny", "--json", "--defaults"]) == 0
    assert json.loads(capsys.readouterr().out)["trainer"]["fast_dev_run"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "llama3_8"], "did you mean 'llama3_8b'"),
        (["show", "llama_tiny", "max_steps"], "'max_steps': not a change of the form path=value"),
        (["show", "llama_tiny", "trainer.max_steps", "5"], "of the form path=value, such as trainer.max_steps=5."),
        (["show", "llama_tiny", "gone.jsonl"], "gone.jsonl is no change of the recipe, and there is no such file"),
        (["data", "preview", "gone.jsonl"], "gone.jsonl: there is no such file"),
        (["show", "llama_tiny", "trainer.max_step=7", "data.seq_length=x"], "did you mean 'max_steps'"),
        (["pretrain", "llama_tiny", "--executor", "slurm"], "neither a profile of this name"),
        (["generate", "."], "needs a prompt"),
        (["generate", "/no/such", "--prompt", "a"], "/no/such does not exist"),
        (["data", "prepare", "x", "--output", "y"], "either --tokenizer PATH or --train-bpe N"),
        (["runs", "report", "/no/such"], "give a run's directory, or the name of a run below"),
        (["pretrain", "llama_tiny", "--devices", "0"], "error: --devices 0: must be at least 1."),
        (["plan", "llama_tiny", "--headroom=3"], "error: --headroom 3: must be at most 0.9."),
        (["plan", "llama_tiny", "--tokens", "many"], "error: --tokens many: must be a number of tokens, such as 1T."),
        (["serve", "x", "--engine", "tgi"], "error: --engine tgi: must be one of 'vllm', 'transformers'."),
        (["--show-completion", "tcsh"], "error: --show-completion tcsh: must be one of 'bash', 'zsh', 'fish'."),
        (["show"], "error: nemo2 show needs NAME. For example: nemo2 show llama3_8b"),
        (["new-recipe", "mine"], "error: nemo2 new-recipe needs --from. For example:"),
        (["runs", "tail"], "error: nemo2 runs tail needs RUN. For example: nemo2 runs tail llama_tiny"),
        (["list", "a", "b"], "error: 'b': nemo2 list takes no such argument. For example:"),
        (["list", "--family"], "error: Option '--family' requires an argument"),
        (["show", "llama_tiny", "--max-steps", "5"], "Write trainer.max_steps=5 or optim.lr_scheduler.max_steps=5"),
        (["nothing"], "error: nemo2 has no command 'nothing'"),
        (["list", "--layout", "cpp=2"], "'cpp=2' is not a size such as pp or cp=2; did you mean 'cp'"),
        (["list", "--layout", "cp=two"], "'cp=two': a size is a whole number, such as cp=2."),
        (["show", "llama_tiny:lorra"], "'lorra' is not a method of fine-tuning; did you mean 'lora'"),
        (["show", "."], ". is a directory without a recipe.json"),
        (["plan", "llama3_8b", "--seq", "64", "data.seq_length=32"], "--seq 64 contradicts data.seq_length=32"),
        (
            ["plan", "llama3_8b", "--global-batch", "8", "data.global_batch_size=16"],
            "--global-batch 8 contradicts data.global_batch_size=16",
        ),
        (["generate", ".", "--prompt", "a", "--prompts", "b"], "--prompt 'a' and --prompts b: leave one of them out."),
        (["prune", ".", "--output", "x"], "prune needs a size to keep: --layers"),
        (["prune", ".", "--output", "x", "--layers", "2", "--drop", "1"], "--layers and --drop both choose the layers"),
        (["data", "preview", "llama_tiny:lora", "--seq-length", "8"], "--seq-length 8: llama_tiny:lora is not a file"),
        (
            ["data", "preview", "llama_tiny:lora", "--chat-template", "x"],
            "--chat-template x: llama_tiny:lora is not a file",
        ),
        (["data", "preview", "llama_tiny:lora"], "llama_tiny:lora has tokenizer='model'"),
        (["runs", "taill", "x"], "error: nemo2 runs has no command 'taill'; did you mean 'tail'?"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # runs of other commands, whose names an error would list, lie in the repository
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in " ".join(captured.err.split()) and "Traceback" not in captured.err and captured.out == ""


def test_files_are_not_changed_or_passed_over_in_silence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("import nemo\n", "utf-8")
    assert main(["translate", "script.py", "--output", "script.py"]) == 2
    assert "script.py exists: use another name, or delete what is there." in capsys.readouterr().err
    assert Path("script.py").read_text("utf-8") == "import nemo\n"
    Path("samples.jsonl").write_text('{"input": "a", "output": "b"}\n', "utf-8")
    assert main(["data", "preview", "samples.jsonl", "data.seq_length=3", "--seq-length", "4"]) == 2
    assert "--seq-length 4 contradicts data.seq_length=3" in capsys.readouterr().err
    for command in ("finetune", "pretrain", "check"):
        assert main([command, "llama_tiny", "samples.jsonl"]) == 2
        assert "samples.jsonl is no change of the recipe" in (text := capsys.readouterr().err)
        assert "--data samples.jsonl" in text


def test_validate_refuses_a_start_besides_its_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ckpt").mkdir()
    for change in ("resume.resume_if_exists=False", "resume.restore_config.path=/x"):
        assert main(["evaluate", "ckpt", change, "--recipe", "llama_tiny", "--dryrun"]) == 2
        assert f"ckpt contradicts {change}: leave one of them out." in capsys.readouterr().err


def test_empty_lists_say_how_they_are_filled(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NEMO2_RECIPES", raising=False)
    monkeypatch.setattr("nemo2.launch.slurm.submission.submissions", lambda: tmp_path)
    for arguments, words in (
        (["list", "--own"], "nemo2 new-recipe NAME"),
        (["runs", "list", "--submitted"], "--executor CLUSTER"),
    ):
        assert main(arguments) == 0
        assert words in capsys.readouterr().out


def test_a_traceback_is_shown_on_request_wherever_the_option_stands(capsys):
    assert main(["show", "llama3_8", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_pretrain_hands_the_changed_recipe_to_the_launcher(monkeypatch, tmp_path, capsys):
    from nemo2.launch import RunResult

    seen = {}

    def launch(recipe, executor, **settings):
        seen.update(recipe=recipe, executor=executor, **settings)
        return RunResult(status="succeeded", exit_code=0, experiment_id="e", run_dir=tmp_path)

    monkeypatch.setattr("nemo2.launch.launch", launch)
    monkeypatch.setenv("COLUMNS", "120")  # a worker of pytest's has 80, in which a long path is folded
    assert main([*example("pretrain"), "--nodes", "1", "--name", "mine", "--dir", str(tmp_path), "-n"]) == 0
    recipe = seen["recipe"]
    assert (recipe.trainer.max_steps, recipe.optim.config.lr) == (50, 1e-3)
    assert (recipe.log.name, recipe.log.log_dir) == ("mine", str(tmp_path))
    assert (seen["executor"], seen["devices"], seen["nodes"], seen["dryrun"]) == ("local", 2, 1, True)
    told = capsys.readouterr()
    assert f"run directory: {tmp_path}" in told.out
    block = dict(line.split(maxsplit=1) for line in told.err.splitlines() if line.startswith("  "))
    assert block["machine"].startswith("2 processes") and block["layout"] == "TP 2 (SP) · DP 1"
    assert block["parameters"] == "3.67M with a vocabulary of 2,048" and block["writes"] == f"to   {tmp_path}/mine"
    assert block["changed"] == "trainer.max_steps=50 optim.config.lr=1e-3"


def test_a_run_has_the_name_that_a_change_or_an_option_gives_it_and_two_are_refused(monkeypatch, tmp_path, capsys):
    from nemo2.launch import RunResult

    seen = []

    def launch(recipe, executor, **settings):
        seen.append((recipe.log.name, recipe.log.log_dir))
        return RunResult(status="succeeded", exit_code=0, experiment_id="e", run_dir=tmp_path)

    monkeypatch.setattr("nemo2.launch.launch", launch)
    assert main(["pretrain", "llama_tiny"]) == 0
    assert main(["pretrain", "llama_tiny", "log.name=mine", "log.log_dir=/there"]) == 0
    assert main(["pretrain", "llama_tiny", "log=default_log(name=a_trial)"]) == 0
    assert main(["evaluate", "--recipe", "llama_tiny"]) == 0
    assert main(["pretrain", "llama_tiny", "log.name=mine", "--name", "mine"]) == 0
    assert [name for name, _ in seen] == ["llama_tiny", "mine", "a_trial", "llama_tiny_validate", "mine"]
    assert seen[1][1] == "/there"
    assert main(["pretrain", "llama_tiny", "log.name=mine", "--name", "yours"]) == 2
    assert "--name yours contradicts log.name=mine" in capsys.readouterr().err


def test_finetune_hands_the_method_and_the_changes_to_the_launcher(monkeypatch, tmp_path):
    from nemo2.launch import RunResult
    from nemo2.models.peft import DoRA, LoRA

    seen = []

    def launch(recipe, executor, **settings):
        seen.append(recipe)
        return RunResult(status="succeeded", exit_code=0, experiment_id="e", run_dir=tmp_path)

    monkeypatch.setattr("nemo2.launch.launch", launch)
    assert main(example("finetune")) == 0
    assert main(["finetune", "llama3_8b", "peft.dim=4", "--packed", "--name", "mine"]) == 0
    assert main(["finetune", "llama3_8b:full"]) == 0
    dora, lora, full = seen
    assert isinstance(dora.peft, DoRA) and dora.resume.restore_config.path == "hf:///models/Llama-3-8B"
    assert (lora.peft.dim, isinstance(lora.peft, LoRA), lora.log.name) == (4, True, "mine")
    assert lora.data.packed_sequence_specs.packed_sequence_size == 4096
    assert (full.log.name, getattr(full, "peft", None)) == ("llama3_8b_full", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama3_8b", "--peft", "lore"], "--peft lore: must be one of 'lora', 'dora', 'full'"),
        (["llama3_8b:full", "--peft", "lora"], "llama3_8b:full sets full, and --peft sets lora"),
        (["llama3_8b_16k"], "llama3_8b_16k has no fine-tuning recipe"),
        (["llama3_9b"], "There is no recipe 'llama3_9b'"),
    ],
)
def test_fine_tuning_that_cannot_be_meant(arguments, words, capsys):
    assert main(["finetune", *arguments, "--dryrun"]) == 2
    assert words in capsys.readouterr().err


def test_validate_measures_the_named_checkpoint(monkeypatch, tmp_path):
    from nemo2.launch import RunResult
    from nemo2.llm.api import validate

    seen = {}

    def launch(recipe, executor, **settings):
        seen["recipe"] = recipe
        return RunResult(status="succeeded", exit_code=0, experiment_id="e")

    monkeypatch.setattr("nemo2.launch.launch", launch)
    (tmp_path / "ckpt").mkdir()
    assert main(["evaluate", str(tmp_path / "ckpt"), "--recipe", "llama_tiny"]) == 0
    assert seen["recipe"].__fn_or_cls__ is validate
    assert seen["recipe"].resume.resume_from_path == str(tmp_path / "ckpt")


@pytest.mark.parametrize(("error", "code"), [(RuntimeFault("rank 1 failed"), 1), (ConfigError("no"), 2)])
def test_the_exit_code_tells_a_failed_run_from_bad_input(monkeypatch, capsys, error, code):
    def launch(*_, **__):
        raise error

    monkeypatch.setattr("nemo2.launch.launch", launch)
    assert main(["pretrain", "llama_tiny"]) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {error}"


@pytest.mark.parametrize("option", [["--json"], ["--output", "-"]])
def test_completions_are_json_lines_and_nothing_else(option, tmp_path, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr("nemo2.llm.api.generate", lambda **given: asked.update(given) or ["text"])
    assert main(["generate", str(tmp_path), "--prompt", "a", *option]) == 0
    assert asked["output_path"] == "/dev/stdout" and asked["on_text"] is None and capsys.readouterr().out == ""
    assert main(["generate", str(tmp_path), "--prompt", "a", "--json", "--output", "x"]) == 2
    assert "--output is not read with --json" in capsys.readouterr().err


def test_prepare_data_writes_a_tokenizer_and_a_dataset(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three " * 50)
    (tmp_path / "b.txt").write_text("four five six " * 50)
    arguments = [str(tmp_path / "*.txt"), "--output", str(tmp_path / "out" / "c"), "--train-bpe", "300"]
    assert main(["data", "prepare", *arguments]) == 0
    assert "2 documents" in capsys.readouterr().out
    before = (tmp_path / "out" / "c_tokenizer.json").read_bytes()
    assert main(["data", "prepare", *arguments[:-1], "400"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "c_tokenizer.json").read_bytes() == before
    assert main(["data", "prepare", *arguments, "--json", "--overwrite"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"] == 2 and told["tokens"] > 100 and told["tokenizer"].endswith("c_tokenizer.json")
    for name in ("c.bin", "c.idx", "c.json", "c_tokenizer.json"):
        assert (tmp_path / "out" / name).is_file()


def test_layouts_sizes_and_patterns_as_shown():
    assert layout_text(Layout()) == "dp"
    assert layout_text(Layout(tp=2, pp=4, vp=5, sp=True)) == "tp=2 pp=4 vp=5 sp"
    assert (short_count(8.03e9), short_count(1.5e12), short_count(7)) == ("8.03B", "1.5T", "7")
    assert matches("LLAMA", "llama3_8b") and matches("llama?_8b", "llama3_8b") and not matches("8b*", "llama3_8b")
