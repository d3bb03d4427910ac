# SPDX-License-Identifier: Apache-2.0
"""Recipes that can't run are refused before anything runs, with every reason at once."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nemo2 import Trainer, recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.preflight.checks import check_recipe, find_problems
from nemo2.preflight.checks.lightning import trainer_problems


def recipe(**changes: Any) -> Any:
    """The Llama 3 8B recipe with fields changed by path, e.g. ``trainer__devices=4``."""
    made = recipes.get("llama3_8b").pretrain_recipe(dir="unused", name="checked")
    made.trainer.num_nodes, made.trainer.devices = 1, 8
    made.trainer.strategy.tensor_model_parallel_size = 1
    made.trainer.strategy.pipeline_model_parallel_size = 1
    made.trainer.strategy.context_parallel_size = 1
    made.trainer.strategy.sequence_parallel = False
    made.data.global_batch_size, made.data.micro_batch_size, made.data.seq_length = 64, 1, 8192
    for path, value in changes.items():
        *parents, field = path.replace("strategy__", "trainer__strategy__").split("__")
        node = made
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, field, value)
    return made


TP = "strategy__tensor_model_parallel_size"


def test_all_broken_rules_are_told_at_once():
    broken = recipe(
        **{TP: 8, "strategy__sequence_parallel": True, "data__seq_length": 100, "data__global_batch_size": 10},
        model__config__ffn_hidden_size=65,
        data__micro_batch_size=4,
        trainer__callbacks=[lambda: None],
    )
    found = find_problems(broken)
    assert len(found) == 4
    for word in ("callbacks", "seq_length=100", "ffn_hidden_size=65", "global_batch_size=10"):
        assert any(word in problem for problem in found), (word, found)
    with pytest.raises(ConfigError) as caught:
        check_recipe(broken)
    assert str(caught.value).splitlines() == found
    assert not torch.distributed.is_initialized()


def test_where_another_layout_would_do_the_nearest_legal_ones_are_the_last_line():
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe(**{TP: 3}))
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("The nearest legal layouts on 8 GPUs: TP 4 · DP 2 (strategy.tensor_model_parallel_size=4); ")
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe(trainer__val_check_interval=0))
    assert "nearest legal layouts" not in str(caught.value)


def test_what_is_launched_must_be_what_the_trainer_was_told():
    with pytest.raises(ConfigError, match=r"trainer\.devices=8, but the executor starts 2 processes per node"):
        check_recipe(recipe(), devices=2)
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=1, but the executor starts 2 nodes"):
        check_recipe(recipe(), nodes=2)
    check_recipe(recipe(), devices=8, nodes=1)


def test_a_launch_on_this_machine_has_one_node():
    several = recipe(trainer__num_nodes=4)
    with pytest.raises(
        ConfigError, match=r"trainer\.num_nodes=4: a launch on this machine starts the ranks of one node, 8 .*devices=N"
    ):
        check_recipe(several, devices=8, nodes=4, local=True)
    check_recipe(several, devices=8, nodes=4)


def test_files_and_devices_are_looked_at_only_where_the_recipe_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    blocked = tmp_path / "file"
    blocked.write_text("")
    elsewhere = recipe(log__log_dir=str(blocked / "runs"), resume__resume_from_path=str(tmp_path / "none"))
    assert find_problems(elsewhere) == []
    found = find_problems(elsewhere, local=True)
    assert any(
        f"log.log_dir={blocked}/runs: this directory cannot be created or written" in problem for problem in found
    )
    assert any("resume.resume_from_path" in problem and "does not exist" in problem for problem in found)
    if not torch.cuda.is_available():
        assert any("trainer.devices=8" in problem and "no GPU" in problem for problem in found)


def test_parallel_sizes_of_the_checks_are_those_of_the_strategy():
    """A size that the strategy grows must be looked at."""
    from nemo2.mcore.parallel.layout import Layout

    strategy = recipe().trainer.strategy
    sizes = [name for name in dir(strategy) if name.endswith("_parallel_size") and not name.startswith("encoder")]
    assert len(sizes) == len([field for field in dataclasses.fields(Layout) if field.name != "sp"])


def test_a_recipe_for_more_gpus_than_a_machine_has_cores_asks_for_a_choice(monkeypatch):
    monkeypatch.setattr("nemo2.preflight.checks.find.usable_cores", lambda: 2.5)
    recipe = recipes.get("llama3_8b").pretrain_recipe()
    with pytest.raises(ConfigError, match=r"trainer\.devices=8: .* this machine has no GPU and 2 CPU cores.*devices=2"):
        check_recipe(recipe, devices=8, local=True, chosen=False)
    with pytest.raises(ConfigError, match="needs 16 GPUs.*nemo2 rehearse.*llama_tiny") as refused:
        check_recipe(recipe, devices=8, nodes=2, local=True, chosen=False)
    assert "ranks of one node" not in str(refused.value)
    check_recipe(recipe, devices=8, local=True, chosen=True)
    check_recipe(recipe, devices=8, local=False, chosen=False)


@pytest.mark.parametrize("name", ["api_key", "token", "hf_token", "db_password", "client_secret"])
def test_a_secret_in_a_recipe_is_refused_without_being_shown(name: str) -> None:
    told = find_problems(recipe(log__extra_loggers=[{"options": {name: "0123456789"}}]))
    assert [words for words in told if f"log.extra_loggers[0].options.{name} holds a secret" in words]
    assert "0123456789" not in "".join(told)


@pytest.mark.parametrize("name", ["pad_token", "json_keys", "tokenizer", "max_tokens", "prompt_key"])
def test_names_that_only_sound_like_secrets_are_none(name: str) -> None:
    assert find_problems(recipe(log__extra_loggers=[{name: "text"}])) == []


@pytest.mark.parametrize(
    "field", ["num_query_groups", "num_attention_heads", "num_layers", "hidden_size", "seq_length"]
)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), "many"])
def test_a_number_that_is_none_is_told_and_ends_no_rule(field: str, value: Any) -> None:
    told = find_problems(recipe(**{f"model__config__{field}": value, TP: 2}))
    rule = "takes a whole number" if isinstance(value, str) else "must be"
    assert any(f"model.config.{field}={value!r}: {rule}" in words for words in told), told


def test_checks_in_several_threads_leave_logging_on():
    def judged(steps: int) -> list[str]:
        return list(trainer_problems(Config(Trainer, max_steps=steps), accelerators=("auto",)))

    with ThreadPoolExecutor(4) as threads:
        assert not any(threads.map(judged, range(9001, 9041)))
    assert logging.root.manager.disable == logging.NOTSET
