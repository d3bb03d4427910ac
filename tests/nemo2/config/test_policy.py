# SPDX-License-Identifier: Apache-2.0
"""A recipe from elsewhere that wants something run, now or later. Each way in is first shown to be one."""

import json
import os
from pathlib import Path

import fiddle as fdl
import pytest
from fiddle._src.experimental import serialization
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from nemo2 import llm
from nemo2.base.errors import ConfigError, SecurityError
from nemo2.cli.sources import recipe_tree
from nemo2.config import Config, Partial, from_json, to_json
from nemo2.data.tokenizer import AutoTokenizer


def layers(spec):
    """A specification of layers with ``spec`` where Megatron-Core looks for the fusion behind attention."""
    submodules = Config(TransformerLayerSubmodules, self_attn_bda=spec)
    return Config(ModuleSpec, module=TransformerLayer, submodules=submodules)


def in_a_recipe(spec):
    config = Config(llm.GPTConfig, num_layers=1, hidden_size=8, num_attention_heads=1)
    config.transformer_layer_spec = layers(spec)
    return config


def bomb(mark):
    """Touches a file when Megatron-Core builds it."""
    return Config(ModuleSpec, module=("os", "system"), params={"command": f"touch {mark}"})


def forged(recipe, old, new):
    """Its JSON with every occurrence of a text replaced."""
    text = to_json(recipe)
    assert old in text
    return text.replace(old, new)


def test_a_spec_that_names_a_command_is_refused_and_megatron_core_alone_would_run_it(tmp_path):
    mark = tmp_path / "mark"
    text = to_json(in_a_recipe(bomb(mark)))
    place = r"transformer_layer_spec.submodules.self_attn_bda.module"
    with pytest.raises(SecurityError, match=rf"names os\.system, but nemo2 does not load it: {place}"):
        from_json(text)
    assert not mark.exists()
    unvetted = fdl.build(serialization.load_json(text))
    build_module(unvetted.transformer_layer_spec.submodules.self_attn_bda)
    assert mark.exists(), "the test's bomb is none"


@pytest.mark.parametrize(
    "module",
    [
        ("os", "system"),
        ["os", "system"],
        {"os": 1, "system": 2},
        Config(dict, os=1, system=2),
        ("builtins", "eval"),
        ("subprocess", "getoutput"),
        ("nemo2.config.reading", "json"),
        ("nemo2.training.run_dir.environment", "subprocess"),
        ("megatron.core.transformer.spec_utils", "import_module"),
        ("megatron.core.models.huggingface.module", "HuggingFaceModule"),
        ("nemo2.llm.api", "generate"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("megatron.core", "no_such_name"),
        "os.system",
        "ab",
        ("os",),
        (1, 2),
    ],
    ids=str,
)
def test_whatever_megatron_core_would_import_for_a_spec_is_refused(module):
    text = to_json(in_a_recipe(Config(ModuleSpec, module=module, params={"command": "true"})))
    with pytest.raises((SecurityError, ConfigError), match="does not load it|not a recipe"):
        from_json(text)


def test_specs_that_name_layers_are_read_as_objects_and_as_text():
    recipe = in_a_recipe(get_bias_dropout_add)
    recipe.transformer_layer_spec.submodules.mlp = Config(
        ModuleSpec, module=("megatron.core.transformer.mlp", "MLP"), params={"command": "is data here"}
    )
    recipe.transformer_layer_spec.submodules.pre_mlp_layernorm = IdentityOp
    back = from_json(to_json(recipe))
    assert back == recipe
    assert import_module(back.transformer_layer_spec.submodules.mlp.module) is MLP
    whole = in_a_recipe(None)
    for options in ({}, {"num_experts": 4, "moe_grouped_gemm": False}, {"multi_latent_attention": True}):
        whole.transformer_layer_spec = get_gpt_layer_local_spec(**options)
        assert from_json(to_json(whole)) == whole


def test_a_users_own_layers_are_read_where_they_are_trusted():
    recipe = in_a_recipe(Config(ModuleSpec, module=("support.config_samples", "Plain")))
    with pytest.raises(SecurityError, match="support.config_samples"):
        from_json(to_json(recipe))
    assert from_json(to_json(recipe), allowed_modules=["support.config_samples"]) == recipe


@pytest.mark.parametrize("field", ["fp8_quantizer_factory", "fp4_quantizer_factory"])
def test_a_quantizer_factory_by_name_is_refused(field):
    recipe = in_a_recipe(None)
    if field not in recipe.__signature_info__.parameters:
        pytest.skip(f"this Megatron-Core has no {field}")
    setattr(recipe, field, "os.system")
    with pytest.raises(SecurityError, match=rf"os\.system, but nemo2 does not load it: {field} has it imported"):
        from_json(to_json(recipe))


PAIR = ["os", "system"]
MET_BEFORE = Config(ModuleSpec, module=PAIR, params={"x": [PAIR]}, metainfo={"first": PAIR})
LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"


@pytest.mark.parametrize(
    "recipe",
    [
        Config(dict, a=[PAIR], b=in_a_recipe(MET_BEFORE), c=[PAIR]),
        Config(dict, fsdp_unit_modules=[LAYER, "os.system"]),
        Config(dict, fsdp_unit_modules="os.system"),
        Config(dict, fsdp_unit_modules=["os"]),
    ],
    ids=["met before under a harmless name", "one unit of several", "a unit", "a module"],
)
def test_a_name_is_refused_wherever_a_library_would_import_it(recipe):
    assert from_json(to_json(Config(dict, fsdp_unit_modules=[LAYER, LAYER])))
    with pytest.raises(SecurityError, match="os"):
        from_json(to_json(recipe))


@pytest.mark.parametrize("value", [True, 1, "yes"])
def test_a_tokenizer_that_runs_its_own_code_is_refused(value):
    tokenizer = Config(AutoTokenizer, pretrained_model_name="x", trust_remote_code=value)
    for recipe in (tokenizer, Config(dict, kwargs={"trust_remote_code": value})):
        with pytest.raises(SecurityError, match=r"trust_remote_code=.*transformers then runs Python"):
            from_json(to_json(recipe))
    assert from_json(to_json(tokenizer), allowed_modules=["transformers:trust_remote_code"]) == tokenizer
    tokenizer.trust_remote_code = False
    assert from_json(to_json(tokenizer)) == tokenizer


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("nemo2.config.reading", "from_json"),
        ("nemo2.config.reading", "RecipePolicy.check_name"),
        ("nemo2.cli", "main"),
        ("nemo2.launch.local", "stop_processes"),
        ("nemo2.llm.api", "generate"),
        ("megatron.core.transformer.spec_utils", "import_module"),
        ("megatron.core.datasets.utils", "compile_helpers"),
        ("megatron.core.parallel_state", "destroy_model_parallel"),
        ("nemo2.base.backend.patching", "Patch"),
        ("megatron.core.tokenizers", "MegatronTokenizer"),
    ],
)
def test_functions_and_classes_that_are_no_part_of_a_model_cannot_be_handed_to_it(module, name):
    text = forged(
        in_a_recipe(get_bias_dropout_add),
        '"module": "megatron.core.fusions.fused_bias_dropout", "name": "get_bias_dropout_add"',
        f'"module": "{module}", "name": "{name}"',
    )
    with pytest.raises(SecurityError, match=name.rpartition(".")[2]):
        from_json(text)


def test_functions_of_layers_are_handed_over_with_arguments_bound_and_others_are_not():
    bound = in_a_recipe(Partial(get_bias_dropout_add, training=True))
    assert from_json(to_json(bound)) == bound
    for refused in (Config(get_bias_dropout_add, True, True), Partial(import_module, ("os", "system"))):
        with pytest.raises(SecurityError, match="would call it"):
            from_json(to_json(in_a_recipe(refused)))


def test_an_entry_point_is_called_at_the_root_only():
    start = Partial(llm.generate, path="run", prompts=["x"], output_path="answers.json")
    assert from_json(to_json(start)) == start
    with pytest.raises(SecurityError, match="generate"):
        from_json(to_json(Config(dict, on_fit_start=start)))


def test_an_argument_that_the_signature_does_not_have_is_vetted_too():
    """Building passes on whatever the file says, and builds it first."""
    spec = Config(ModuleSpec, module=MLP, metainfo=Config(dict, x=Config(ModuleSpec, module=("os", "system"))))
    with pytest.raises(SecurityError, match=r"hidden\.x\.module"):
        from_json(forged(spec, '"metainfo"', '"hidden"'))


def test_a_bomb_of_shared_lists_is_refused_at_once():
    tree = json.loads(to_json(Config(dict, a=[1])))
    (key,) = [name for name, value in tree["objects"].items() if value["type"].get("name") == "list"]
    template = tree["objects"].pop(key)
    item = template["items"][0]
    for level in range(60):
        inside = {"type": "ref", "key": f"{key}{level}"} if level else 1
        name = key if level == 59 else f"{key}{level + 1}"
        tree["objects"][name] = {**template, "items": [[item[0], inside], [item[0], inside]]}
    with pytest.raises(ConfigError, match="add up to more than"):
        from_json(json.dumps(tree))


def test_the_commands_that_only_look_leave_no_mark(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from nemo2.cli.app import app

    mark, folder = tmp_path / "mark", tmp_path / "run"
    recipe = llm.llama_tiny.pretrain_recipe()
    recipe.model.config.transformer_layer_spec = layers(bomb(mark))
    folder.mkdir()
    (folder / "recipe.json").write_text(to_json(recipe))
    monkeypatch.chdir(tmp_path)
    shows = (["--explain", "all"], ["--diff", "llama_tiny"], ["--layout"], ["--python"], [])
    commands = [["check"], ["plan"], ["rehearse"], ["pretrain"], *(["show", *options] for options in shows)]
    for command, *options in commands:
        result = CliRunner().invoke(app, [command, f"{folder}{os.sep}", *options])
        told = f"{result.output} {result.exception!r}"
        assert result.exit_code != 0 and ("os.system" in told or "os\\.system" in told), (command, told[-800:])
    assert not mark.exists()
    assert not list(Path(folder).glob("*.svg"))


def test_a_configuration_of_something_else_is_no_recipe_for_a_command(tmp_path):
    target = tmp_path / "written"
    start = Partial(llm.generate, path="/x", prompts=["x"], output_path=str(target))
    for config, name in ((start, "generate"), (Config(llm.GPTModel), "GPTModel")):
        (tmp_path / "recipe.json").write_text(to_json(config))
        with pytest.raises(ConfigError, match=f"describes a call of {name}, but a recipe describes"):
            recipe_tree(str(tmp_path / "recipe.json"))


@pytest.mark.parametrize("kind", ["pipe", "huge", "folder"])
def test_what_is_no_file_of_a_bearable_size_is_not_read_as_a_recipe(tmp_path, kind):
    file = tmp_path / "run" / "recipe.json"
    file.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        with open(file, "wb") as sparse:
            sparse.truncate(1 << 40)
    with pytest.raises(ConfigError, match="without a recipe.json|bytes, and at most"):
        recipe_tree(str(file.parent) + os.sep)


def test_the_description_of_a_checkpoint_is_vetted_like_a_recipe_until_its_user_trusts_the_code(tmp_path):
    from nemo2.checkpoint.context import load_context
    from nemo2.hugging_face.checkpoint import Checkpoint

    context, mark = tmp_path / "context", tmp_path / "mark"
    context.mkdir()
    (context / "model.json").write_text(to_json(Config(llm.GPTModel, in_a_recipe(bomb(mark)))))
    (context / "tokenizer.json").write_text(to_json(Config(AutoTokenizer, "x", trust_remote_code=True)))
    checkpoint = Checkpoint("nemo2", tmp_path, str(tmp_path))
    for read, what in (
        (lambda: load_context(tmp_path, "model"), r"os\.system"),
        (lambda: load_context(tmp_path, "tokenizer"), "trust_remote_code"),
        (checkpoint.tokenizer, "trust_remote_code"),
    ):
        with pytest.raises(SecurityError, match=what):
            read()
    assert not mark.exists()
    assert checkpoint.tokenizer(trust_remote_code=True).trust_remote_code is True
