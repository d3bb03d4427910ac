# SPDX-License-Identifier: Apache-2.0
import base64
import inspect
import json
import pathlib
import sys
from datetime import timedelta

import fiddle as fdl
import nemo_run as run
import pytest
import torch
from fiddle._src.experimental import serialization

from nemo2.config import Config, check_serialisable, from_json, to_json
from nemo2.errors import ConfigError, SecurityError
from support.config_samples import Callback, Options, Plain, recipe

SAMPLES = ["support.config_samples"]


def forged(module, name, *, original="train"):
    """A recipe's JSON in which one name is replaced."""
    text = to_json(recipe())
    changed = text.replace(
        f'"module": "support.config_samples", "name": "{original}"', f'"module": "{module}", "name": "{name}"'
    )
    assert changed != text
    return changed


def test_a_recipe_comes_back_equal_with_all_its_values():
    r = recipe()
    r.strategy.root = pathlib.Path("/x")
    r.strategy.timeout = timedelta(hours=1)
    r.model.dtype = torch.bfloat16
    r.model.act = torch.nn.functional.silu
    r.trainer.callbacks.append(Callback(every=8))
    r.options = {"act": torch.tanh, "nested": [(1, None)], "plain": run.Config(Options)}
    back = from_json(to_json(r, indent=2), allowed_modules=SAMPLES)
    assert back == r and back.strategy.ddp_config.overlap_grad_sync is False
    assert fdl.build(back)()[1].callbacks[1].every == 8


def test_megatrons_configs_and_lightnings_callbacks_are_allowed():
    from lightning.pytorch.callbacks import ModelSummary
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    configs = [
        Config(TransformerConfig, num_layers=2, hidden_size=8, num_attention_heads=2),
        Config(OptimizerConfig, lr=1e-3),
        Config(ModelSummary, max_depth=2),
        Config(pathlib.Path, "x"),
        Config(dict, a=Config(timedelta, minutes=1)),
    ]
    for config in configs:
        assert from_json(to_json(config)) == config


def test_a_name_off_the_list_is_refused():
    with pytest.raises(
        SecurityError, match=r"support\.config_samples\.\w+.*allowed_modules=\['support.config_samples:\w+'\]"
    ):
        from_json(to_json(recipe()))
    with pytest.raises(SecurityError, match="support.config_samples"):
        from_json(to_json(recipe()), allowed_modules=["support.config_samples:train"])
    assert from_json(to_json(Config(Callback)), allowed_modules=["support.config_samples:Callback"]) == Config(Callback)


def test_a_prefix_is_a_package_not_a_spelling():
    with pytest.raises(SecurityError):
        from_json(to_json(Config(Callback)), allowed_modules=["config_sample"])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.serialization", "load"),
        ("nemo2.base.files", "json.loads"),
        ("nemo2.config.wire", "sys.modules"),
        ("nemo2.config.reading", "from_json"),
        ("nemo2.config.tree", "as_config"),
        ("megatron.core.parallel_state", "destroy_model_parallel"),
        ("nemo_run.config", "Script"),
        ("importlib", "import_module"),
    ],
)
def test_dangerous_names_are_refused(module, name):
    with pytest.raises(SecurityError, match=name.split(".")[-1].replace(".", r"\.")):
        from_json(forged(module, name), allowed_modules=SAMPLES)


def test_nothing_is_imported_for_a_refused_name(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "trap_module.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\ndef f(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in (forged("trap_module", "f"), forged("trap_module", "Deep.f", original="Callback")):
        with pytest.raises(SecurityError, match="trap_module"):
            from_json(text, allowed_modules=SAMPLES)
    assert not marker.exists() and "trap_module" not in sys.modules


def test_reading_calls_nothing(tmp_path):
    marker = tmp_path / "marker"
    text = to_json(Config(Callback, every=f"touch {marker}"))
    evil = text.replace(
        '"module": "support.config_samples", "name": "Callback"', '"module": "subprocess", "name": "getoutput"'
    )
    evil = evil.replace('"every"', '"cmd"')
    with pytest.raises(SecurityError, match="getoutput"):
        from_json(evil, allowed_modules=SAMPLES)
    assert not marker.exists()
    fdl.build(serialization.load_json(evil))  # without the policy it does what it says
    assert marker.exists()


def test_metadata_that_names_something_to_call_is_refused():
    tree = json.loads(to_json(recipe()))
    for value in tree["objects"].values():
        if isinstance(value["type"], dict) and value["type"]["name"] == "BuildableTraverserMetadata":
            value["metadata"] = {"type": "pyref", "module": "support.config_samples", "name": "Callback"}
    with pytest.raises(SecurityError, match="which recipes cannot contain"):
        from_json(json.dumps(tree), allowed_modules=SAMPLES)


def test_objects_that_recipes_are_not_made_of_are_refused():
    from collections import defaultdict

    with pytest.raises(SecurityError, match="defaultdict"):
        from_json(to_json(Config(Callback, every=defaultdict(list))), allowed_modules=SAMPLES)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"root": 1}', '{"root": {"type": "pyref"}, "objects": {}}', "[" * 100_000, b"\xff\xfe"],
)
def test_what_is_no_recipe_is_a_config_error(text):
    with pytest.raises(ConfigError, match="not a recipe in JSON"):
        from_json(text)


def test_a_pickle_in_disguise_is_no_recipe():
    import pickle

    with pytest.raises(ConfigError, match="not a recipe in JSON"):
        from_json(base64.b64encode(pickle.dumps(Plain())))


def test_a_missing_class_of_another_version_is_a_config_error():
    with pytest.raises(ConfigError, match="another version"):
        from_json(forged("support.config_samples", "Gone", original="Callback"), allowed_modules=SAMPLES)


def test_writing_names_what_cannot_be_written():
    r = recipe()
    r.options = Plain()
    with pytest.raises(ConfigError, match="options = "):
        to_json(r)


def test_a_recipe_that_can_travel_passes():
    check_serialisable(recipe())


def test_all_that_stands_in_the_way_is_named_at_once_with_who_set_it():
    r = recipe()
    r.model.act = lambda x: x
    line = inspect.currentframe().f_lineno - 1
    r.trainer.lr = float("nan")
    r.trainer.callbacks.append(Plain())
    changed = Callback()
    changed.every = 3
    r.options = [changed]
    with pytest.raises(ConfigError) as caught:
        check_serialisable(r)
    message = str(caught.value)
    assert message.startswith("4 values of this recipe cannot be sent")
    assert "model.act = <function" in message and f"{__file__}:{line}" in message and "`def`" in message
    assert "trainer.lr = nan" in message
    assert (
        "trainer.callbacks[1] = <support.config_samples.Plain" in message
        and "nemo2.config.Config(Plain, ...)" in message
    )
    assert "options[0]: " in message and "live Callback whose every=3 changed" in message


@pytest.mark.parametrize("value", [Plain().__init__, (i for i in ()), open, range(3), {1: Plain()}])
def test_other_live_things_are_refused(value):
    r = recipe()
    r.options = value
    with pytest.raises(ConfigError, match="options"):
        check_serialisable(r)


def test_a_closure_as_the_target_is_refused():
    from nemo2.config import Config

    def local():
        return 1

    with pytest.raises(ConfigError, match="cannot be imported by name"):
        check_serialisable(Config(local))
