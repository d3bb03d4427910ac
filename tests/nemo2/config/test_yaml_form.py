# SPDX-License-Identifier: Apache-2.0
import pathlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import fiddle as fdl
import pytest
import torch
import yaml

from nemo2 import recipes
from nemo2.base.errors import ConfigError, SecurityError
from nemo2.config import Config, Partial, flatten, from_yaml, to_json, to_yaml, who_set
from nemo2.config.yaml_form import apply_form, read
from support.config_samples import Callback, Mode, Options, Plain, recipe

SAMPLES = ["support.config_samples"]


def fine_tuning() -> Any:
    made: Any = recipes.get("llama3_8b").finetune_recipe(peft_scheme="dora")
    made.peft.target_modules = ["linear_qkv"]
    return made


def with_whole_betas() -> Any:
    """Whole numbers in a field of floats, which stay whole."""
    pretrain: Any = recipes.get("llama_tiny").pretrain_recipe().__fn_or_cls__
    return Partial(pretrain, optim=Config(torch.optim.AdamW, betas=(0, 1)))


PRETRAINING = [recipes.get(name).pretrain_recipe for name in recipes.names()[::8]]  # one assembler makes them all


@pytest.mark.parametrize("make", [*PRETRAINING, fine_tuning, with_whole_betas])
def test_a_recipe_comes_back_as_the_same_json(make: Any) -> None:
    made = make()
    assert to_json(from_yaml(to_yaml(made))) == to_json(made)


@pytest.mark.parametrize(
    "value",
    [
        "no", "off", "1e-4", "3e4", "12", "0x1f", "~", "", "a: b", "# c", " x ", "1:30", "2026-01-01", "\n", "é ☃", "<<", "=",
        "*a", "@", "a\x85b", "\u2028",
        1e-5, 3e-4, -0.5, 1e300, float("inf"), 7, -3, 0, True, None, [], {}, [1, [2, "x"]], {"a": {"b": [1]}}, {1: 2},
        (1, 2), [(1, None)], {(1, 2): "x"}, {"_target_": "x"}, {"_args_": 1}, frozenset({1, 2}), {"x", "y"},
        pathlib.Path("/x y"), pathlib.PurePosixPath("x"),
        timedelta(seconds=1.5), timedelta(days=2), torch.bfloat16, torch.device("cpu"), torch.tanh,
        torch.nn.functional.silu, Mode.EXACT, Options, Config(Options, mode=Mode.FAST, share=1),
        Partial(Callback, every=2), [Config(Callback, every=2)], Config(dict, a=Config(Callback)),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was_where_nothing_says_what_it_is(value: Any) -> None:
    made: Any = recipe()
    made.options = value
    back = from_yaml(to_yaml(made), SAMPLES)
    assert back == made and type(back.options) is type(value) and to_json(back) == to_json(made)


def test_a_value_is_written_as_people_write_it_where_its_field_says_what_it_is() -> None:
    made: Any = recipe()
    made.strategy.root = pathlib.Path("/x")
    made.strategy.timeout = timedelta(hours=1)
    made.model.dtype = torch.bfloat16
    made.model.act = torch.nn.functional.silu
    made.options = Config(Options, mode=Mode.EXACT, split=(1, 2), note="no")
    shown = yaml.safe_load(to_yaml(made))
    assert shown["_target_"] == "support.config_samples.train" and shown["_partial_"] is True
    assert shown["trainer"]["strategy"]["root"] == "/x" and shown["trainer"]["strategy"]["timeout"] == "1h"
    assert shown["model"]["dtype"] == "torch.bfloat16" and shown["model"]["act"] == "torch.nn.functional.silu"
    assert shown["options"]["split"] == [1, 2] and shown["options"]["mode"] == "EXACT"
    assert shown["trainer"]["callbacks"] == [{"_target_": "support.config_samples.Callback", "every": 3}]
    assert from_yaml(to_yaml(made), SAMPLES) == made
    assert yaml.safe_load(to_yaml(made, defaults=True))["trainer"]["max_steps"] == 10


def test_a_wrong_value_comes_back_wrong_for_the_checks_to_tell() -> None:
    made: Any = recipe()
    made.trainer.max_steps = "ten"
    made.options = Config(Options, name=7, extra=[1])
    assert from_yaml(to_yaml(made), SAMPLES) == made


def test_configs_that_are_shared_stay_shared() -> None:
    made: Any = recipe()
    shared = Config(Callback, every=5)
    made.trainer.callbacks = [shared, shared, Config(Callback, every=5)]
    back = from_yaml(to_yaml(made), SAMPLES)
    first, second, third = back.trainer.callbacks
    assert first is second and third is not first
    built = fdl.build(back)()[1].callbacks
    assert built[0] is built[1] and built[2] is not built[0]


def test_what_is_wrong_is_told_by_its_line_and_all_at_once() -> None:
    text = to_yaml(recipe()).replace("every: 3", "evry: 3\n    every: often")
    line = text.splitlines().index("    evry: 3") + 1
    with pytest.raises(ConfigError) as error:
        from_yaml(text, SAMPLES, source="run.yaml")
    told = str(error.value)
    assert f"run.yaml:{line}: trainer.callbacks[0].evry: " in told and "did you mean 'every'" in told
    assert f"run.yaml:{line + 1}: trainer.callbacks[0].every: takes a whole number" in told


def test_who_set_a_field_is_the_line_of_the_file() -> None:
    back = from_yaml(to_yaml(recipe()), SAMPLES, source="run.yaml")
    [(file, line)] = [one[:2] for one in who_set(back.trainer.callbacks[0], "every")]
    assert file == "run.yaml" and to_yaml(recipe()).splitlines()[line - 1].strip() == "every: 3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "the key 'a' occurs twice"),
        ("a: [1", "run.yaml:1: this is not YAML"),
        ("- 1", "a recipe in YAML must be a mapping"),
        ("", "a recipe in YAML must be a mapping"),
        ("a: 1", "a recipe in YAML must be a mapping"),
        ("_target_: nemo2.llm.api.pretrain\n_partial_: true\nmodel: &a [*a]", "aliases contain each other"),
        ("? [1]\n: 2", "a key that is not a scalar"),
        ("_target_: nemo2.training.trainer.NoSuch", "this class, function or constant does not exist"),
        ("_target_: nemo2.training.trainer.Trainer\nmax_steps: 1.5", "run.yaml:2: max_steps: takes a whole number"),
        ("_target_: nemo2.training.trainer.Trainer\nmax_steps: {_target_: datetime.timedelta, _args_: [x]}", "timedelta"),
        ("\n".join([f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" if n else "a0: &a0 [x]" for n in range(9)]), "more than"),
        ("[" * 5000, "not YAML"),
        (f"a: {'9' * 5000}", "not YAML"),
        ("_target_: nemo2.Trainer\nmax_time: {_target_: datetime.timedelta, _args_: [99999999999]}", "timedelta"),
        ("_target_: nemo2.training.trainer.Trainer\n_partial_: no", "run.yaml:2: : _partial_ takes true or false, not 'no'"),
        ("_target_: torch.nn.functional.gelu", "`_call_: false`"),
        (b"\xff\xfe\x00", "not YAML"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused_in_one_sentence(text: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        from_yaml(text, source="run.yaml")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "_target_: os.system\ncommand: touch MARK",
        "_target_: os.system\n_args_: [touch MARK]",
        "_target_: nemo2.training.trainer.Trainer\nlogger: {_target_: subprocess.Popen, args: [touch, MARK]}",
        "_target_: nemo2.training.trainer.Trainer\nlogger: {_target_: builtins.eval, _args_: ['1']}",
        "_target_: nemo2.training.trainer.Trainer\nlogger: {_target_: os.system, _call_: false}",
        "_target_: nemo2.training.trainer.Trainer\nlogger: {_target_: nemo2.training.run_dir.logger.os.system, _call_: false}",
        "_target_: nemo2.training.trainer.Trainer\nlogger: {_target_: nemo2.base.files.os, _call_: false}",
        "_target_: megatron.core.transformer.spec_utils.ModuleSpec\nmodule: [os, system]",
        "!!python/object/apply:os.system ['touch MARK']",
        "_target_: nemo2.training.trainer.Trainer\nlogger: !!python/name:os.system",
        "_target_: imported_for_this.Thing",
    ],
)
def test_a_file_that_names_what_recipes_do_not_hold_is_refused_before_anything_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imported_for_this.py").write_text("open('MARK', 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    nested = f"_target_: nemo2.llm.api.pretrain\n_partial_: true\nmodel:\n  {text}".replace("\n", "\n  ", 3)
    for one in (text, nested.replace("\n  _partial_: true\n  model", "\n_partial_: true\nmodel")):
        with pytest.raises((SecurityError, ConfigError)):
            from_yaml(one)
    assert not (tmp_path / "MARK").exists()


def test_changes_go_into_configs_and_a_target_takes_their_place() -> None:
    made: Any = recipe()
    form = read(
        "trainer:\n  max_steps: 3\n  lr: 3e-4\n  strategy:\n    ddp_config:\n      bucket_size: 10\nstrategy.timeout: 10m\n"
        "options: {_target_: support.config_samples.Options, extra: {a: 1}}\n"
        "model: {_target_: support.config_samples.Model, layers: 1}\n",
        "run.yaml",
    )
    apply_form(made, form, SAMPLES, source="run.yaml")
    assert made.trainer.max_steps == 3 and made.trainer.lr == 3e-4 and made.strategy.timeout == timedelta(minutes=10)
    assert made.strategy.ddp.bucket_size == 10 and made.strategy.ddp.overlap_grad_reduce is False
    assert made.options == Config(Options, extra={"a": 1}) and flatten(made)["model._target_"].endswith(".Model")
    assert who_set(made.trainer, "max_steps")[-1][:2] == ("run.yaml", 2)


def test_changes_that_cannot_be_made_are_told_together_and_none_is_made() -> None:
    made: Any = recipe()
    form = read(
        "trainer:\n  max_steps: 3\n  max_stepz: 4\n  lr: fast\n  max_steps?: 5\n"
        "model: {_target_: support.config_samples.Plain, x: 1}",
        "f",
    )
    with pytest.raises(ConfigError) as error:
        apply_form(made, form, SAMPLES, source="f")
    assert "f:6: model.x" in str(error.value)
    form.pop("model")
    with pytest.raises(ConfigError) as error:
        apply_form(made, form, SAMPLES, source="f")
    assert "f:3: trainer.max_stepz=4" in str(error.value) and "f:4: trainer.lr=fast: takes a number" in str(error.value)
    assert "f:5: trainer.max_steps?=5" in str(error.value)
    assert made == recipe()


@pytest.mark.parametrize(("value", "words"), [(Plain(), "options = "), (b"x", "b'x'"), (slice(1), "slice")])
def test_writing_names_what_cannot_be_written(value: Any, words: str) -> None:
    made: Any = recipe()
    made.options = value
    with pytest.raises(ConfigError, match=words):
        to_yaml(made)
