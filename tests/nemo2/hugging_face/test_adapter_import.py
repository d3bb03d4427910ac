# SPDX-License-Identifier: Apache-2.0
"""Adapters that `peft` has made, over transformers' models, as checkpoints of ours: logits, three steps on, out again."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nemo2 import llm
from nemo2.base.errors import CheckpointError, ConfigError, Nemo2Error
from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.directory import read_manifest
from nemo2.cli.app import app
from nemo2.hugging_face.adapter_import import _linear_name, import_adapter
from nemo2.hugging_face.adapter_rows import module_of
from nemo2.hugging_face.adapters import export_adapter
from nemo2.hugging_face.api import import_ckpt
from nemo2.hugging_face.released import described
from nemo2.models.conversion.families import conversion_for
from nemo2.models.walker import linear_layers
from support import nightly, small_runs
from support.hf_models import ROWS, released_config
from support.peft_models import logits_of, logits_of_checkpoint, made_by_peft, steps
from support.tiny_releases import released

ALL = "all-linear"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "what peft takes by itself": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "ranks and alphas by pattern": (
        "llama",
        {
            "target_modules": ALL,
            "rank_pattern": {"down_proj": 6, "layers.1.self_attn.q_proj": 2, "^model.layers.0.mlp.up_proj": 3},
            "alpha_pattern": {"o_proj": 3, "^model.layers.1": 5},  # the second matches no whole name
        },
    ),
    "parameters": (
        "llama",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["down_proj.weight", "o_proj.weight"],
            "rank_pattern": {"o_proj.weight": 2},
            "alpha_pattern": {"down_proj.weight": 3, "o_proj": 5},
        },
    ),
    "rank-stabilised": ("llama", {"target_modules": ALL, "use_rslora": True, "rank_pattern": {"k_proj": 2}}),
    "DoRA of some parts": (
        "llama",
        {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"], "use_dora": True},
    ),
    "one layer": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "biases": ("qwen2", {"target_modules": ALL}),
    "fused already": ("phi3", {"target_modules": ALL}),
    "fused already, DoRA": ("phi3", {"target_modules": ALL, "use_dora": True}),
    "beside experts": ("mixtral", {"target_modules": ["q_proj", "k_proj", "o_proj"]}),
    "modules in full": (
        "qwen2",
        {
            "target_modules": ["q_proj", "v_proj", "gate_proj"],
            "modules_to_save": ["embed_tokens", "lm_head", "norm", "o_proj"],
        },
    ),
    "one layer in full": (
        "llama",
        {"target_modules": ["down_proj"], "use_dora": True, "modules_to_save": ["layers.1.self_attn.k_proj"]},
    ),
    "a tied embedding in full": (
        "llama, tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "transposed layers": ("gpt2", {"target_modules": ["c_attn", "c_fc"]}),
    "a layer without a gate": ("nemotron", {"target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "attention whose output has a gate": (
        "qwen3.5",
        {"target_modules": ["q_proj", "v_proj", "in_proj_qkv", "in_proj_z"], "use_dora": True},
    ),
    "latent attention": ("deepseek", {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
}
KINDS = {
    "fused already": "LoRA",
    "fused already, DoRA": "DoRA",
    "DoRA of some parts": "CanonicalDoRA",
    "attention whose output has a gate": "CanonicalDoRA",
    "one layer in full": "DoRA",
    "transposed layers": "LoRA",
    "latent attention": "LoRA",
}
TRAINED = ("biases", "modules in full", "a tied embedding in full")
DAILY = (
    "ranks and alphas by pattern",
    "parameters",
    "DoRA of some parts",
    "fused already",
    "beside experts",
    "latent attention",
    "transposed layers",
    "attention whose output has a gate",
    "a layer without a gate",
    *TRAINED,
)
STEPS, RATE = 3, 1e-3


def compared(directory: str, name: str) -> dict[str, Any]:
    import peft
    import transformers

    family, settings = CASES[name]
    folder = released(directory, family)
    place = f"{directory}/{name}"
    theirs = made_by_peft(folder, f"{place}/theirs", **settings)
    wanted = logits_of(theirs)
    scale = float(wanted.abs().max())
    imported = import_ckpt(None, f"{place}/theirs", f"{place}/ours")
    method = load_context(imported, "model").model_transform
    exported = export_adapter(imported, f"{place}/out")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, str(exported)).eval()
    said = {"imported": logits_of_checkpoint(imported), "exported": logits_of(again)}
    with again.disable_adapter():
        said["without"] = logits_of(again)
    differences = {how: float((logits - wanted).abs().max()) / scale for how, logits in said.items()}
    run = trained(folder, theirs, imported, method, f"{place}/on") if name in TRAINED else {}
    return {"kind": type(method).__name__, **differences, **run}


def trained(folder: str, theirs: Any, imported: Path, method: Any, place: str) -> dict[str, Any]:
    """Three steps of ours from the imported checkpoint, and three of peft's."""

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from support.tiny_releases import model_of

    model = model_of(folder, rate=RATE)
    model.model_transform = method
    keep = ModelCheckpoint(dirpath=place, filename="{step}", save_last=False)
    run = small_runs.fit(
        model,
        max_steps=STEPS,
        callbacks=[keep],
        restore_config=RestoreConfig(path=str(imported)),
        ckpt_save_part="trained",
    )
    small_runs.release()
    manifest, began = read_manifest(Path(place) / f"step={STEPS}"), read_manifest(imported)
    assert manifest is not None and began is not None
    same_base = (manifest.part_of, manifest.part_of_digest) == (began.part_of, began.part_of_digest)
    return {
        "ours": run["losses"],
        "theirs": steps(theirs, STEPS, rate=RATE),
        "same base": same_base and began.part_of_digest != "",
    }


def all_compared(directory: str, names: list[str]) -> dict[str, Any]:
    small_runs.quiet()
    found = {name: compared(directory, name) for name in names}
    return found | {"over a checkpoint": over_a_checkpoint(directory), "another base": with_another_base(directory)}


def over_a_checkpoint(directory: str) -> dict[str, Any]:
    """The same adapter over the imported release."""
    base = import_ckpt(None, released(directory, "llama"), f"{directory}/base")
    place = f"{directory}/DoRA of some parts"
    imported = import_ckpt(None, f"{place}/theirs", f"{place}/over ours", base_model=str(base))
    manifest = read_manifest(imported)
    assert manifest is not None
    difference = (logits_of_checkpoint(imported) - logits_of_checkpoint(Path(f"{place}/ours"))).abs().max()
    return {"part of": manifest.part_of, "base": str(base), "difference": float(difference)}


def with_another_base(directory: str) -> list[str]:
    """What is said where the base has been changed since, a release and a checkpoint."""

    from nemo2.checkpoint.forms.form import digest_of_base

    said = []
    folder = Path(released(directory, "llama"))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    digest_of_base.cache_clear()
    shutil.rmtree(f"{directory}/base")
    import_ckpt(None, str(folder), f"{directory}/base")
    for place in ("ours", "over ours"):
        try:
            logits_of_checkpoint(Path(f"{directory}/DoRA of some parts/{place}"))
            said.append("nothing")
        except Nemo2Error as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def runs(request, run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    folder, names = str(tmp_path_factory.mktemp("imported")), nightly.requested(request, "name")
    return run_on_ranks(all_compared, 1, folder, [*dict.fromkeys([*names, "DoRA of some parts"])], timeout=300)[0]


@pytest.mark.parametrize("name", nightly.each_case(CASES, DAILY))
def test_our_model_says_what_pefts_says_and_so_does_what_is_exported_again(runs, name):
    found = runs[name]
    assert found["without"] > 1e-3  # the adapter makes a difference
    assert found["imported"] < 1e-5
    assert found["exported"] < 1e-5
    assert found["kind"] == KINDS.get(name, "CanonicalLoRA")


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on_from_an_imported_adapter_as_peft_goes_on(runs, name):
    found = runs[name]
    assert len(set(found["ours"])) == STEPS
    assert found["ours"] == pytest.approx(found["theirs"], rel=1e-5)
    assert found["same base"]


def test_the_base_may_be_a_checkpoint_of_ours(runs):
    found = runs["over a checkpoint"]
    assert found["part of"] == found["base"]
    assert found["difference"] < 1e-6


def test_other_weights_at_the_base_s_place_are_refused_by_their_digest(runs):
    for said in runs["another base"]:
        assert "other weights" in said and "digests differ" in said


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[str, Path]:
    directory = str(tmp_path_factory.mktemp("bad"))
    folder = released(directory, "llama")
    made_by_peft(folder, f"{directory}/adapter", target_modules=["q_proj", "v_proj"])
    return folder, Path(f"{directory}/adapter")


@pytest.fixture
def adapter(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "adapter"))


def change(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def rewrite(adapter: Path, function: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(function(load_file(file)), file)


def replace_each(function: Any) -> Any:
    """``function``: of a tensor's name and value, the pair in its place, or None."""
    return lambda adapter: rewrite(
        adapter, lambda tensors: dict(filter(None, (function(*one) for one in tensors.items())))
    )


def add(name: str, *shape: int) -> Any:
    named = {f"base_model.model.model.{name}": torch.ones(shape)}
    return lambda adapter: rewrite(adapter, lambda tensors: tensors | named)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("r", 0),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("layer_replication", [[0, 2]]),
        ("lora_bias", True),
        ("trainable_token_indices", [3]),
        ("of_a_later_version", 7),
    ],
)
def test_what_our_methods_have_not_got_is_refused_by_field_and_value(adapter, tmp_path, field, value):
    change(adapter, **{field: value})
    with pytest.raises(ConfigError) as error:
        import_adapter(adapter, tmp_path / "out")
    assert f"{field}={value!r}" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_layers_of_further_predictions_are_among_the_models_linear_layers():
    row = next(row for row in ROWS if row.name == "GLM-4.5")
    conversion = conversion_for(released_config(row))
    config = described(conversion, released_config(row) | {"num_nextn_predict_layers": 1})
    modules = {module_of(entry)[0] for entry in conversion.entries(config, vocab_rows=config.vocab_size)}
    further = {_linear_name(module) for module in modules if ".mtp." in module and "linear" in module}
    assert further and further <= set(linear_layers(config) or {})


BAD: dict[str, tuple[Any, str]] = {
    "a pickle": (
        lambda adapter: (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin"),
        "adapter_model.bin",
    ),
    "one factor": (
        replace_each(lambda name, one: None if "0.self_attn.q_proj.lora_A" in name else (name, one)),
        "lacks lora_A",
    ),
    "a wider norm": (add("norm.weight", 48), "model.norm.weight is [48] in the adapter, but [32] in the base"),
    "in full and by additions": (
        add("layers.0.self_attn.k_proj.weight", 16, 32),
        "self_attention.linear_qkv in full, and peft.target_modules",
    ),
    "neither of both": (add("embed_tokens.lora_embedding_A", 4, 32), "lora_embedding_A is neither an adapter"),
    "experts as one parameter": (add("layers.0.mlp.experts.lora_A.weight", 4, 32), "adapts all experts of a layer"),
    "a layer that isn't there": (
        replace_each(lambda name, one: (name.replace("layers.1", "layers.7"), one)),
        "model.layers.7.self_attn.q_proj",
    ),
    "a wider model": (
        replace_each(lambda name, one: (name, one if "lora_B" in name else one.repeat(1, 2))),
        "trained on a model of another size",
    ),
    "not a number": (replace_each(lambda name, one: (name, one * float("nan"))), "not finite numbers"),
    "another rank": (lambda adapter: change(adapter, r=8), "gives it rank 8"),
    "no base": (lambda adapter: change(adapter, base_model_name_or_path=None), "base_model_name_or_path"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_command_refuses_adapters_that_do_not_fit_and_writes_nothing(adapter, tmp_path, name):
    spoil, words = BAD[name]
    spoil(adapter)
    with pytest.raises((CheckpointError, ConfigError), match=".*") as error:
        CliRunner().invoke(
            app,
            ["import", str(adapter), "--output", str(tmp_path / "out")],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_command_imports_an_adapter_and_says_what_may_follow(adapter, made, tmp_path):
    result = CliRunner().invoke(app, ["import", str(adapter), "--output", str(tmp_path / "out"), "--base", made[0]])
    assert result.exit_code == 0, result.output
    assert f"nemo2 export {tmp_path / 'out'} --merge" in result.output


def test_adapters_and_their_base_are_not_replaced_by_what_is_made_of_them(adapter, made, tmp_path, command):
    base = import_ckpt(None, made[0], tmp_path / "base")
    ours = import_ckpt(None, adapter, tmp_path / "ours", base_model=base)
    for target in (base, ours):
        for write in (export_adapter, llm.peft.merge_lora):
            with pytest.raises(CheckpointError, match="would be deleted"):
                write(ours, target, overwrite=True)
        said = command("export", ours, "--merge", "--output", target, "--overwrite", code=2).err
        assert "would be deleted" in said
    assert {"base", "ours", "adapter"} == {path.name for path in tmp_path.iterdir()}


def test_adapters_alone_are_neither_pruned_nor_distilled(adapter, made, tmp_path):
    ours = str(import_ckpt(None, adapter, tmp_path / "ours", base_model=made[0]))
    with pytest.raises(ConfigError, match="only a part of a model"):
        llm.prune(ours, str(tmp_path / "small"), llm.PruningConfig(drop_layers=[1]))
    with pytest.raises(ConfigError, match="only a part of a model"):
        llm.distill(ours, made[0], data=cast(Any, object()), trainer=cast(Any, object()))


def test_a_base_is_refused_where_there_is_no_adapter(made, tmp_path):
    with pytest.raises(ConfigError, match="base_model='elsewhere'"):
        import_ckpt(None, made[0], tmp_path / "out", base_model="elsewhere")


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_tied_embedding_that_an_adapter_has_parted_from_the_output_layer_is_refused(tmp_path, saved):
    folder = released(str(tmp_path), "llama, tied")
    made_by_peft(folder, str(tmp_path / "adapter"), target_modules=["q_proj"], modules_to_save=saved)
    with pytest.raises(ConfigError, match="embedding and the output layer are one tensor"):
        import_adapter(tmp_path / "adapter", tmp_path / "out")
