# SPDX-License-Identifier: Apache-2.0
"""`nemo2 check`: what it prints, how it ends, and that its advice is good."""

import json
import shlex
from typing import Any

import pytest

from nemo2.cli import check as command
from nemo2.cli.adapter import described
from nemo2.cli.app import main
from nemo2.preflight.checks.table import RULES


def verdict(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_recipe_as_it_ships_is_legal_and_exits_with_0(capsys):
    assert main(["check", "llama31_405b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama31_405b on ") and f"legal, {len(RULES)} rules hold" in out
    assert "\033" not in out  # colours are for terminals


def test_a_recipe_that_does_not_fit_named_gpus_exits_with_1(capsys):
    assert main(["check", "llama3_8b", "--gpus", "A100-40"]) == 1
    told = capsys.readouterr().out
    assert "a launch needs --force" in told and "`nemo2 rehearse llama3_8b --gpus A100-40`" in told
    assert main(["check", "llama3_8b", "data.micro_batch_size=4"]) == 0  # the kind of the GPUs is not known
    told = capsys.readouterr().out
    assert "does not fit" in told and "(assumed)" in told and "--force" not in told


def test_a_recipe_without_a_figure_of_memory_says_what_explains_it(capsys, monkeypatch):
    monkeypatch.setattr("nemo2.preflight.planner.fit.fit_of", lambda *_, **__: None)  # as for a model of the user's own
    assert main(["check", "llama3_8b", "trainer.max_steps=7"]) == 0
    assert "`nemo2 rehearse llama3_8b trainer.max_steps=7` says why" in capsys.readouterr().out


def test_all_broken_rules_are_told_with_their_arithmetic_and_the_exit_code_is_2(capsys):
    code, told = verdict(
        capsys,
        "llama3_8b",
        "strategy.tensor_model_parallel_size=3",
        "data.micro_batch_size=0",
        "trainer.val_check_interval=0",
    )
    rules = {problem["rule"] for problem in told["problems"]}
    assert code == 2
    assert {
        "dense-sizes-divide-the-world",
        "feed-forward-over-tensor-ranks",
        "data-module-accepts-its-arguments",
        "validation-interval-is-a-count",
    } <= rules
    assert any("3 * 1 * 2 = 6" in problem["message"] for problem in told["problems"])


def test_the_layouts_it_suggests_are_legal(capsys, monkeypatch):
    monkeypatch.setattr(
        "nemo2.preflight.planner.fit.fit_of", lambda *_, **__: None
    )  # a rehearsal for each takes seconds
    code, told = verdict(capsys, "mixtral_8x7b", "strategy.expert_model_parallel_size=3")
    assert code == 2 and len(told["nearest_layouts"]) == 3
    for near in told["nearest_layouts"]:
        assert verdict(capsys, "mixtral_8x7b", *near["overrides"])[0] == 0


def test_devices_and_nodes_are_the_trainers(capsys):
    code, told = verdict(capsys, "llama3_8b", "--devices", "4", "--nodes", "2")
    assert (code, told["devices"], told["nodes"]) == (0, 4, 2)
    assert verdict(capsys, "llama3_8b", "--devices", "3")[0] == 2
    for option in ("--devices", "--nodes"):
        code, told = verdict(capsys, "llama3_8b", option, str(10**22))  # its layouts would never end
        assert code == 2 and (told["nodes"], told["devices"]) == (1, None)
        assert [one["rule"] for one in told["problems"]] == ["nodes-and-devices-are-counts"]
        assert command.report(told).startswith("llama3_8b: 1 problem\n")


def test_a_gpu_that_lacks_a_format_is_told_and_an_unknown_one_gets_the_nearest_name(capsys):
    assert verdict(capsys, "llama3_8b", "trainer.plugins.fp8=hybrid", "--gpu", "H100x64")[0] == 0
    code, told = verdict(capsys, "llama3_8b", "trainer.plugins.fp8=hybrid", "--gpu", "A100")
    assert code == 2 and "8.9 or newer, but this GPU has 8.0" in told["problems"][0]["message"]
    assert main(["check", "llama3_8b", "--gpu", "H1000"]) == 2
    assert "did you mean 'H100'" in capsys.readouterr().err


def test_the_report_names_each_rule_and_its_colours_are_for_terminals():
    told = {
        "recipe": "r",
        "nodes": 2,
        "devices": 8,
        "layout": "TP 3",
        "rules": 9,
        "problems": [{"rule": "some-rule", "topic": "Ranks", "message": "a is 3. " * 40}],
        "nearest_layouts": [{"layout": "TP 2 · DP 8", "overrides": ["strategy.x=2"]}],
    }
    plain = command.report(told)
    assert plain.startswith("r on 2 nodes x 8, TP 3: 1 problem\n") and max(map(len, plain.splitlines())) <= 120
    assert "some-rule  (Ranks)" in plain and "TP 2 · DP 8  strategy.x=2" in plain
    assert "\033[31m1 problem\033[0m" in command.report(told, colours=True)


def test_rules_are_listed_without_a_recipe(capsys):
    assert main(["check", "--rules", "--json"]) == 0
    assert [row["rule"] for row in json.loads(capsys.readouterr().out)] == [rule.name for rule in RULES]
    assert main(["check", "--rules"]) == 0
    assert "feed-forward-over-tensor-ranks" in capsys.readouterr().out
    assert main(["check"]) == 2
    assert "check needs a recipe" in capsys.readouterr().err


def test_the_example_of_its_help_works(capsys):
    assert main(["check", "--help"]) == 0
    example = described(command.check)[2]
    assert example in " ".join(capsys.readouterr().out.split())
    words = shlex.split(example)[1:]
    assert main(words) == 0


def test_the_machine_that_was_checked_for_is_told(capsys):
    assert main(["check", "llama3_8b"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "checked for GPUs of any kind"
    assert main(["check", "llama3_8b", "trainer.devices=auto", "--gpus", "H100x64"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("llama3_8b on 8 nodes x 8, CP 2 · DP 32: legal") and told.endswith("checked for H100\n")
