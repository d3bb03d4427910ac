# SPDX-License-Identifier: Apache-2.0
"""The limits of userbuffers, against what each version of Transformer Engine refuses (tests/transformer_engine) and the names
that Megatron-Core's own sources give buffers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fiddle as fdl
import megatron.core
import pytest
import torch

from nemo2 import recipes
from nemo2.base.errors import DataError
from nemo2.callbacks import MegatronCommOverlapCallback
from nemo2.config import apply_overrides
from nemo2.mcore.overlap import userbuffers
from nemo2.mcore.overlap.userbuffer_limits import uncarried, without_buffers
from nemo2.mcore.overlap.userbuffers import OneSize
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig, OptimizerConfig
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle import Machine, settle
from nemo2.mcore.settle.overlap import overlap
from nemo2.mcore.settle.run_settings import RunSettings
from nemo2.models.llama import LlamaConfig
from nemo2.preflight.checks.find import find
from nemo2.preflight.explain import explain

TABLES = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parents[4] / "tests" / "transformer_engine").glob("*.json")
}
QUANTIZER_OF = {
    "delayed": "Float8Quantizer",
    "tensorwise": "Float8CurrentScalingQuantizer",
    "blockwise": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
    "nvfp4": "NVFP4Quantizer",
}


def a_model(**fields: Any) -> Any:
    settled: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "tp_comm_bulk_wgrad": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    }
    return SimpleNamespace(**settled | fields)


def told(version: str, tokens: int | None = 4096, **fields: Any) -> list[str]:
    return [sentence for _, sentence in uncarried(a_model(**fields), version=version, tokens=tokens)]


@pytest.mark.parametrize("recipe", QUANTIZER_OF)
@pytest.mark.parametrize("version", TABLES)
def test_a_format_is_refused_where_the_version_refuses_it(version: str, recipe: str) -> None:
    kind = "fp4" if recipe == "nvfp4" else "fp8"
    quantizers = TABLES[version]["userbuffers"], TABLES[version]["quantizers"]
    if isinstance(quantizers[1], str):  # refuses all but scaling per tensor, in these words
        carried = recipe in ("delayed", "tensorwise")
    else:
        carried = quantizers[1].get(QUANTIZER_OF[recipe], "the version has none") is None
    sentences = told(version, **{kind: "hybrid", f"{kind}_recipe": recipe})
    assert bool(sentences) is not carried, sentences
    assert all(f"trainer.plugins.{kind}_recipe='{recipe}' with tp_comm_overlap=True" in one for one in sentences)


@pytest.mark.parametrize("version", [one for one, table in TABLES.items() if table["userbuffers"]["mxfp8_rows"]])
def test_mxfp8_travels_in_the_multiples_that_the_version_takes(version: str) -> None:
    for rows, refused in TABLES[version]["userbuffers"]["mxfp8_rows"].items():
        sentences = told(version, 2 * int(rows), fp8="e4m3", fp8_recipe="mxfp8")
        assert bool(sentences) is (refused is not None)
    assert told(version, None, fp8="e4m3", fp8_recipe="mxfp8") == []


@pytest.mark.parametrize("version", TABLES)
def test_a_delayed_weight_gradient_has_no_exchange_beside_it(version: str) -> None:
    refused = TABLES[version]["userbuffers"]["beside_a_delayed_wgrad"]
    assert bool(told(version, delay_wgrad_compute=True)) is str(refused).startswith("AssertionError")
    assert told(version, delay_wgrad_compute=True, tp_comm_bulk_wgrad=False) == []


@pytest.mark.parametrize("version", TABLES)
def test_layers_in_two_dtypes_need_two_sets_of_buffers(version: str) -> None:
    one_set = TABLES[version]["userbuffers"]["two_modes"] is None
    model = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    assert bool(told(version, **model)) is one_set
    assert told(version, **model | {"fp8": None}) == []


# ------------------------------------------------------------------------------------------------------ projections

ROOT = Path(megatron.core.__path__[0])
KNOWN = {"qkv", "proj", "fc1", "fc2"}
OTHERS = {
    "multi_latent_attention.py": {"multi_latent_attention": True},
    "absorbed_mla.py": {"multi_latent_attention": True},
    "multi_token_prediction.py": {"mtp_num_layers": 1},
    "heterogeneous_layer_specs.py": {
        "per_block_parameters": [
            SimpleNamespace(
                attention=SimpleNamespace(replace_with_linear=True), mlp=SimpleNamespace(replace_with_linear=False)
            )
        ]
    },
}


def test_every_module_of_megatron_core_that_names_another_buffer_is_known() -> None:
    found = set()
    for path in [path for path in ROOT.rglob("*.py") if "extensions" not in path.parts]:
        names = re.findall(r"""tp_comm_buffer_name["']?\s*[=:]\s*["'](\w+)["']""", path.read_text())
        if set(names) - KNOWN:
            found.add(path.name)
    assert "multi_latent_attention.py" in found and found <= OTHERS.keys()
    assert all(without_buffers(a_model(**fields)) for fields in OTHERS.values())
    assert without_buffers(a_model()) is None


def a_run(model: Any) -> RunSettings:
    return RunSettings(
        parallelism=SimpleNamespace(**Layout(tp=2, sp=True).fields()),  # pyright: ignore[reportArgumentType]
        ddp_config=DistributedDataParallelConfig(),
        optimizer_config=OptimizerConfig(lr=1e-3),
        model_config=model,
        machine=Machine.named("H100"),
    )


def test_a_callback_leaves_it_off_where_projections_have_none_and_says_why() -> None:
    said: list[str] = []
    recipe = recipes.get("deepseek_v2_lite").pretrain_recipe()
    model = fdl.build(recipe.model.config)
    decided = overlap(
        a_run(model),
        [MegatronCommOverlapCallback(tp_comm_overlap=True)],
        world_size=2,
        data_sampler=None,
        say=lambda words, *values: said.append(words % values),
    )
    assert decided["tp_comm_overlap"].value is False and model.tp_comm_overlap is False
    assert any("no buffers for the projections of multi-latent attention" in line for line in said)


# ----------------------------------------------------------------------------------------------------------- recipes

PERFORMANCE = "llama3_70b"


def performance_mode() -> tuple[Any, Any]:
    """The recipe, and its overlap callback."""
    recipe = recipes.get(PERFORMANCE).pretrain_recipe(performance_mode=True)
    return recipe, next(one for one in recipe.trainer.callbacks if "MegatronCommOverlapCallback" in str(one))


def refusals(plugin: str, *, version: str, overlapped: bool = True) -> list[tuple[str, str]]:
    recipe, callback = performance_mode()
    callback.tp_comm_overlap = overlapped
    recipe = apply_overrides(recipe, [f"trainer.plugins={plugin}"]) or recipe
    machine = Machine(model="h100", transformer_engine=version)
    return [(one.rule, one.message) for one in find(recipe, machine=machine)]


@pytest.mark.parametrize(
    ("plugin", "version", "words"),
    [
        ("bf16_with_fp8_subchannel_scaling_mixed", "2.20", "does not support userbuffers for this format"),
        ("bf16_with_mxfp8_mixed", "2.2", "Install 2.4 or newer"),
        ("bf16_with_mxfp8_mixed", "2.20", ""),
        ("bf16_with_fp8_current_scaling_mixed", "2.2", "Install 2.8 or newer"),
        ("bf16_with_fp8_current_scaling_mixed", "2.20", ""),
        ("bf16_with_fp8_mixed", "2.2", ""),
    ],
)
def test_a_performance_recipe_is_refused_for_the_machines_version(plugin: str, version: str, words: str) -> None:
    found = refusals(plugin, version=version)
    assert [rule for rule, _ in found] == (["userbuffers-carry-the-format"] if words else [])
    assert all(words in message for _, message in found)
    assert refusals(plugin, version=version, overlapped=False) == []


def test_explain_shows_each_switch_with_its_reason() -> None:
    recipe, callback = performance_mode()
    machine = Machine(model="h100", transformer_engine="2.20")
    callback.tp_comm_overlap_cfg = {"fc1_fprop": None}
    for name, value in (("tp_comm_bulk_dgrad", True), ("tp_comm_overlap_disable_fc1", True)):
        [place] = explain(recipe, settle(recipe, machine), f"model.config.{name}")
        assert place.effective is value
    [place] = explain(recipe, settle(recipe, machine), "model.config.tp_comm_overlap_disable_fc1")
    assert "follows from tp_comm_overlap_cfg for fc1_fprop, fc1_dgrad" in str(place)


def test_a_preset_whose_switch_turns_off_what_it_sets_is_told() -> None:
    said: list[str] = []
    name = "userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora"
    overlap(
        a_run(LlamaConfig(num_layers=2, hidden_size=8192, num_attention_heads=64)),
        [MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg=name)],
        world_size=2,
        data_sampler=SimpleNamespace(seq_len=4096, micro_batch_size=1),
        say=lambda words, *values: said.append(words % values),
    )
    [line] = [line for line in said if "qkv_fprop" in line]
    assert "qkv_fprop is off, because fc1_dgrad scatters" in line and "tp_comm_overlap_disable_qkv=True" in line


# ------------------------------------------------------------------------------------------------------- their size


@pytest.mark.parametrize(("rows", "length", "fits"), [(2, 64, True), (1, 64, False), (2, 32, False), (1, 128, True)])
def test_micro_batches_of_another_size_are_refused(
    monkeypatch: pytest.MonkeyPatch, rows: int, length: int, fits: bool
) -> None:
    """Buffers for 2 x 64 tokens, of which context parallelism leaves half on a rank."""
    monkeypatch.setattr(userbuffers, "_running", {"shape": [64, 8]})
    config = SimpleNamespace(tp_comm_overlap=True, context_parallel_size=2)
    batches = [{"tokens": torch.zeros(2, 64)}, {"tokens": torch.zeros(rows, length)}, {"cu_seqlens": None}]
    step: Any = SimpleNamespace(
        pipeline=SimpleNamespace(config=config), stage="validation", microbatches=lambda: batches
    )
    if fits:
        return OneSize().on_megatron_microbatches_start(step)
    with pytest.raises(DataError, match=rf"of validation has {rows} x {length} = .* = 128\. Pad samples"):
        OneSize().on_megatron_microbatches_start(step)
