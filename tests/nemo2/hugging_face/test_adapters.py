# SPDX-License-Identifier: Apache-2.0
"""Adapters against the `peft` package over transformers' own models: logits after training, and ten steps of it."""

from typing import Any

import pytest

from support import nightly, small_runs
from support.peft_models import logits_of, steps
from support.tiny_releases import model_of, released

FUSED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SINGLE = ["linear_proj", "linear_fc2"]
PARTS = ["linear_q", "linear_v", "linear_proj", "linear_fc1_up", "linear_fc2"]
EXPERTS = "mixtral, beside its experts"
CASES: dict[str, tuple[str, str, list[str]]] = {
    "llama": ("llama", "LoRA", FUSED),
    "llama, layers that aren't fused": ("llama", "LoRA", SINGLE),
    "llama, DoRA": ("llama", "DoRA", FUSED),
    "llama, DoRA, layers that aren't fused": ("llama", "DoRA", SINGLE),
    "llama, parts": ("llama", "CanonicalLoRA", PARTS),
    "qwen2, parts": ("qwen2", "CanonicalLoRA", PARTS),
    "phi3, parts": ("phi3", "CanonicalLoRA", PARTS),
    EXPERTS: ("mixtral", "LoRA", ["linear_qkv", "linear_fc1", "linear_fc2"]),
    "mixtral": ("mixtral", "LoRA", ["linear_qkv", "linear_proj"]),
}
ALIKE = [
    name
    for name, (family, kind, targets) in CASES.items()
    if (kind == "CanonicalLoRA" and family != "phi3") or targets == SINGLE
]
"""Where peft has the same parameters. Of a fused layer's parts it has a first factor each, and ours may share one."""
DAILY = ("llama", "llama, DoRA", "qwen2, parts", "phi3, parts", EXPERTS)
STEPS = 10
RATE = 1e-3


def train(folder: str, directory: str, method: Any, *, base: str, max_steps: int) -> dict[str, Any]:
    """Some steps from ``base``, the adapters kept at each end."""
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    small_runs.release()
    model = model_of(folder, rate=RATE)
    model.model_transform = method
    keep = ModelCheckpoint(dirpath=directory, filename="{step}", save_last=False, save_optim_on_train_end=True)
    return small_runs.fit(
        model,
        max_steps=max_steps,
        callbacks=[keep],
        restore_config=RestoreConfig(path=base),
        ckpt_save_part="trained",
        inspect=lambda trainer: logits(trainer.strategy.megatron_parallel.unwrapped[0]),
    )


def logits(core: Any) -> Any:
    import torch

    tokens = small_runs.global_batch(0, 4)["tokens"]
    core.eval()
    with torch.no_grad():
        return core(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).clone()


def compared(directory: str, name: str) -> dict[str, Any]:
    """Two steps of ours; then ten more of ours, and ten of peft's from the adapters that the two have made."""
    import peft
    import transformers

    from nemo2.hugging_face.adapters import export_adapter
    from nemo2.models import peft as methods

    small_runs.quiet()
    family, kind, targets = CASES[name]
    folder = released(directory, family)

    def method() -> Any:
        return getattr(methods, kind)(target_modules=targets, dim=4, alpha=8, lora_B_init_method="normal")

    place = f"{directory}/{name}"
    first = train(folder, place, method(), base=f"hf://{folder}", max_steps=2)
    adapter = export_adapter(f"{place}/step=2", f"{place}/hf")
    after = train(folder, f"{place} on", method(), base=f"{place}/step=2", max_steps=STEPS)

    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs: Any = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    theirs.eval()
    their_logits = logits_of(theirs)
    scale = float(their_logits.abs().max())
    back = imported_again(adapter, folder, f"{place}/back") if name == EXPERTS else first["inspected"]
    trained = sum(one.requires_grad for one in theirs.parameters())
    return {
        "back": float((back - first["inspected"]).abs().max()) / scale,
        "difference": float((first["inspected"] - their_logits).abs().max()) / scale,
        "ours": after["losses"],
        "theirs": steps(theirs, STEPS, rate=RATE),
        "trained": trained,
    }


def imported_again(adapter: Any, folder: str, place: str) -> Any:
    """Logits of the exported adapter, imported."""
    from nemo2.checkpoint.context import load_context
    from nemo2.hugging_face.api import import_ckpt
    from nemo2.training.strategies.set_up import set_up

    small_runs.release()
    checkpoint = import_ckpt(None, str(adapter), place, base_model=folder)
    trainer = small_runs.build_trainer(max_steps=1)
    with set_up(trainer, load_context(checkpoint, "model"), checkpoint=checkpoint) as parallel:
        return logits(parallel.unwrapped[0])


def all_compared(directory: str, names: list[str]) -> dict[str, Any]:
    return {name: compared(directory, name) for name in names}


@pytest.fixture(scope="module")
def runs(request, run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    folder, names = str(tmp_path_factory.mktemp("adapters")), nightly.requested(request, "name")
    return run_on_ranks(all_compared, 1, folder, [*dict.fromkeys([*names, EXPERTS])], timeout=240)[0]


@pytest.mark.parametrize("name", nightly.each_case(CASES, DAILY))
def test_peft_says_what_our_model_says_with_its_adapters(runs, name):
    assert runs[name]["trained"] > 0
    assert runs[name]["difference"] < 1e-6


def test_additions_beside_experts_come_back_as_they_went(runs):
    assert runs[EXPERTS]["back"] < 1e-6


@pytest.mark.parametrize("name", nightly.each_case(ALIKE, [name for name in ALIKE if name in DAILY]))
def test_ten_steps_are_those_that_peft_takes(runs, name):
    found = runs[name]
    assert len(set(found["ours"])) == STEPS
    assert found["ours"] == pytest.approx(found["theirs"], rel=1e-5)
