# SPDX-License-Identifier: Apache-2.0
"""Trained adapters, exported, against the `peft` package over transformers' own models. Its steps are compared in
tests/nemo2/models/peft/test_as_peft.py."""

from typing import Any

import pytest

from nemo2.config.provenance import adjust
from support import nightly, small_runs
from support.peft_models import logits_of, logits_of_checkpoint, our_logits_of
from support.tiny_releases import model_of, released

FUSED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SINGLE = ["linear_proj", "linear_fc2"]
PARTS = ["linear_q", "linear_v", "linear_proj", "linear_fc1_up", "linear_fc2"]
EXPERTS = "mixtral, beside its experts"
SHARED = "dense layers, experts and shared experts"
GATED = "attention whose output has a gate"
ROUTERS = "frozen biases of routers that are trained in full"
NESTED = "modules trained in full, inside a module with tensors of its own, and a checkpoint of the whole model"
FUSED_THERE = "parts of a layer that is fused alike in the release"
BACK = (EXPERTS, SHARED, GATED, ROUTERS)
CASES: dict[str, tuple[str, str, list[str]]] = {
    "llama": ("llama", "LoRA", FUSED),
    "llama, layers that aren't fused": ("llama", "LoRA", SINGLE),
    "llama, DoRA": ("llama", "DoRA", FUSED),
    "llama, DoRA, layers that aren't fused": ("llama", "DoRA", SINGLE),
    "llama, parts": ("llama", "CanonicalLoRA", PARTS),
    "qwen2, parts": ("qwen2", "CanonicalLoRA", PARTS),
    FUSED_THERE: ("starcoder", "CanonicalLoRA", ["linear_q", "linear_v", "linear_proj"]),
    "phi3, parts": ("phi3", "CanonicalLoRA", PARTS),
    EXPERTS: ("mixtral", "LoRA", ["linear_qkv", "linear_fc1", "linear_fc2"]),
    SHARED: ("glm4 moe", "LoRA", FUSED),
    GATED: ("qwen3.5", "DoRA", [*FUSED, "in_proj"]),
    "those of a class that peft's table lacks": ("qwen2 moe", "LoRA", FUSED),
    "mixtral": ("mixtral", "LoRA", ["linear_qkv", "linear_proj"]),
    NESTED: ("qwen3.5", "LoRA", ["linear_fc2"]),
    ROUTERS: ("glm4 moe", "LoRA", ["linear_proj"]),
}
SAVED = {ROUTERS: ["router"], NESTED: ["self_attention"]}
CHANGES = {ROUTERS: {"moe_router_bias_update_rate": 1.0}}
DAILY = ("llama", "llama, DoRA", "qwen2, parts", "phi3, parts", *BACK, NESTED, FUSED_THERE)


def train(folder: str, directory: str, method: Any, part: Any, **changes: Any) -> Any:
    """Two steps from the release, the adapters kept at the end. Returns the logits then."""
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    small_runs.release()
    model = model_of(folder, rate=1e-3)
    for field, value in changes.items():
        adjust(model.config, field, value, why="what must not be trained would tell")
    model.model_transform = method
    keep = ModelCheckpoint(dirpath=directory, filename="{step}", save_last=False, save_optim_on_train_end=True)
    return small_runs.fit(
        model,
        max_steps=2,
        callbacks=[keep],
        restore_config=RestoreConfig(path=f"hf://{folder}"),
        ckpt_save_part=part,
        inspect=lambda trainer: our_logits_of(trainer.strategy.megatron_parallel.unwrapped[0]),
    )["inspected"]


def compared(directory: str, name: str) -> dict[str, Any]:
    """How far logits after training are from those of peft with the exported adapter, and of the adapter imported again."""
    import peft
    import transformers

    from nemo2 import llm
    from nemo2.models import peft as methods

    small_runs.quiet()
    family, kind, targets = CASES[name]
    folder, place = released(directory, family), f"{directory}/{name}"
    factors = {"dim": 4, "alpha": 8, "lora_B_init_method": "normal"}
    method = getattr(methods, kind)(target_modules=targets, modules_to_save=SAVED.get(name), **factors)
    ours = train(folder, place, method, None if name == NESTED else "trained", **CHANGES.get(name, {}))
    adapter = llm.export_ckpt(f"{place}/step=2", "hf-peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs: Any = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    expected = logits_of(theirs.eval())
    back, again = imported_again(adapter, folder, f"{place}/back") if name in BACK else (ours, method)
    scale = float(expected.abs().max())
    return {
        "trained": sum(one.requires_grad for one in theirs.parameters()),
        "back": float((back - ours).abs().max()) / scale,
        "method": [(type(one), {*one.target_modules}, one.dim, one.alpha) for one in (method, again)],
        "difference": float((ours - expected).abs().max()) / scale,
    }


def imported_again(adapter: Any, folder: str, place: str) -> tuple[Any, Any]:
    """Logits of the exported adapter, imported, and its method."""
    from nemo2.checkpoint.context import load_context
    from nemo2.hugging_face.api import import_ckpt

    imported = import_ckpt(None, str(adapter), place, base_model=folder)
    return logits_of_checkpoint(imported), load_context(imported, "model").model_transform


def all_compared(directory: str, names: list[str]) -> dict[str, Any]:
    return {name: compared(directory, name) for name in names}


@pytest.fixture(scope="module")
def runs(request, run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    folder, names = str(tmp_path_factory.mktemp("adapters")), nightly.requested(request, "name")
    return run_on_ranks(all_compared, 1, folder, [*dict.fromkeys([*names, *BACK])], timeout=240)[0]


@pytest.mark.parametrize("name", nightly.each_case(CASES, DAILY))
def test_peft_says_what_our_model_says_with_its_adapters(runs, name):
    assert runs[name]["trained"] > 0
    assert runs[name]["difference"] < 1e-6


@pytest.mark.parametrize("name", BACK)
def test_adapters_come_back_as_they_went(runs, name):
    assert runs[name]["back"] < 1e-6
    before, after = runs[name]["method"]
    assert after == before


@pytest.mark.parametrize(
    ("kind", "modules", "reason"),
    [
        ("DoRA", ["model.layers.1.mlp.shared_expert.up_proj"], "has no DoRA for"),
        ("CanonicalLoRA", ["model.layers.1.mlp.experts.0.up_proj"], "experts.0.gate_proj has none"),
        ("CanonicalLoRA", ["model.layers.1.mlp.experts.0.w1"], "experts.0.w3 has none"),
    ],
)
def test_adapters_beside_experts_that_peft_cannot_load_are_refused(kind, modules, reason):
    import torch

    from nemo2.base.errors import ConfigError
    from nemo2.hugging_face.adapters import _adapter_config, _Released
    from nemo2.models import peft as methods
    from nemo2.models.conversion.pieces import Piece
    from nemo2.models.conversion.table import Entry

    names = [f"model.layers.1.mlp.experts.0.{leaf}.weight" for leaf in ("gate_proj", "up_proj", "down_proj")]
    entries = [Entry(key="", shape=(4, 4), at=(), pieces=tuple(Piece(name=name, start=0, stop=4) for name in names))]
    adapted = {name: _Released(4, firsts=[torch.zeros(2, 4)]) for name in modules}
    with pytest.raises(ConfigError, match=reason):
        _adapter_config(adapted, entries, getattr(methods, kind)(dim=2), "")


def test_adapters_that_peft_does_not_load_into_mixers_are_told(caplog):
    import peft
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    from nemo2.hugging_face.adapters import _adapter_config, _Released
    from nemo2.models.peft import LoRA
    from support.hf_models import ROWS

    row = next(row for row in ROWS if row.config == "NemotronHConfig")
    with torch.device("meta"):
        base = NemotronHForCausalLM(NemotronHConfig(**row.fields))
    for leaf in ("in_proj", "out_proj"):
        caplog.clear()
        adapted = {f"model.layers.0.mixer.{leaf}": _Released(4, firsts=[torch.zeros(2, 4)])}
        config = peft.LoraConfig(**_adapter_config(adapted, [], LoRA(dim=2), ""))
        try:
            peft.get_peft_model(base, config)
            loads = True
        except ValueError:
            loads = False
        assert ("out_proj" not in caplog.text) == loads == (leaf == "in_proj")


@pytest.mark.parametrize(("position", "told"), [("pre", False), ("post", True)])
def test_dropout_that_peft_puts_elsewhere_is_told(caplog, position, told):
    from nemo2.hugging_face.adapters import _adapter_config
    from nemo2.models.peft import LoRA

    described = _adapter_config({}, [], LoRA(dim=2, dropout=0.1, dropout_position=position), "")
    assert described["lora_dropout"] == 0.1 and ("dropout_position='post'" in caplog.text) is told
