# SPDX-License-Identifier: Apache-2.0
import base64
import inspect
import json
import pathlib
import pickle
import sys
from collections import defaultdict
from datetime import timedelta

import fiddle as fdl
import nemo_run as run
import pytest
import torch
from fiddle._src.experimental import serialization

from nemo2.base.errors import ConfigError, SecurityError
from nemo2.config import Config, check_serialisable, from_json, to_json
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


def with_metadata_to_call():
    tree = json.loads(to_json(recipe()))
    for value in tree["objects"].values():
        if isinstance(value["type"], dict) and value["type"]["name"] == "BuildableTraverserMetadata":
            value["metadata"] = {"type": "pyref", "module": "support.config_samples", "name": "Callback"}
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("text", "allowed", "error", "words"),
    [
        (
            to_json(recipe()),
            (),
            SecurityError,
            r"\.config_samples\.\w+.*allowed_modules=\['support.config_samples:\w+'\]",
        ),
        (to_json(recipe()), ["support.config_samples:train"], SecurityError, "support.config_samples"),
        (to_json(Config(Callback)), ["support.config_sample"], SecurityError, "support.config_samples"),
        (with_metadata_to_call(), SAMPLES, SecurityError, "which recipes cannot contain"),
        (to_json(Config(Callback, every=defaultdict(list))), SAMPLES, SecurityError, "defaultdict"),
        (forged("support.config_samples", "Gone", original="Callback"), SAMPLES, ConfigError, "another version"),
        (base64.b64encode(pickle.dumps(Plain())), (), ConfigError, "not a recipe in JSON"),
        *[
            (text, (), ConfigError, "not a recipe in JSON")
            for text in ("", "{", "[]", "3", "{}", '{"root": 1}', '{"root": {"type": "pyref"}, "objects": {}}')
        ],
        ("[" * 100_000, (), ConfigError, "not a recipe in JSON"),
        (b"\xff\xfe", (), ConfigError, "not a recipe in JSON"),
    ],
    ids=lambda value: "" if isinstance(value, str | bytes) else None,
)
def test_what_is_not_allowed_or_no_recipe_is_refused(text, allowed, error, words):
    with pytest.raises(error, match=words):
        from_json(text, allowed_modules=allowed)


def test_a_single_name_can_be_allowed():
    assert from_json(to_json(Config(Callback)), allowed_modules=["support.config_samples:Callback"]) == Config(Callback)


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


@pytest.mark.parametrize("value", [Plain(), Plain().__init__, (i for i in ()), open, range(3), {1: Plain()}])
@pytest.mark.parametrize("write", [check_serialisable, to_json])
def test_other_live_things_are_refused_by_their_path(write, value):
    r = recipe()
    write(r)
    r.options = value
    with pytest.raises(ConfigError, match="options"):
        write(r)


def test_a_closure_as_the_target_is_refused():
    with pytest.raises(ConfigError, match="cannot be imported by name"):
        check_serialisable(Config(lambda: 1))
