# SPDX-License-Identifier: Apache-2.0
"""Our additions against `peft`'s over transformers' models, from the same values: outputs, gradients, ten steps."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.hugging_face.api import import_ckpt
from support import nightly, small_runs
from support.peft_models import backward, logits_of, made_by_peft, steps
from support.tiny_releases import model_of, released

ATTENTION, FEED_FORWARD = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
TARGETS: dict[str, Any] = {
    "llama": ATTENTION + FEED_FORWARD,
    "qwen2": ATTENTION + FEED_FORWARD,  # biases of queries, keys and values
    "mixtral": ATTENTION,
    # Of "down_proj" peft makes additions beside all experts at once too, which are no linear layers of transformers'.
    "deepseek with experts": LATENT,
}
CASES = {f"{family}, {kind}": (family, kind) for family in TARGETS for kind in ("LoRA", "DoRA")}
EXPERTS = {"mixtral", "deepseek with experts"}
DAILY = ("llama, DoRA", "qwen2, DoRA", "mixtral, DoRA", "deepseek with experts, LoRA")
STEPS, RATE = 10, 1e-3


def compared(directory: str, name: str) -> dict[str, Any]:
    from nemo2.checkpoint.context import load_context
    from nemo2.training.strategies.set_up import set_up

    family, kind = CASES[name]
    folder, place = released(directory, family), f"{directory}/{name}"
    theirs = made_by_peft(folder, f"{place}/theirs", target_modules=TARGETS[family], use_dora=kind == "DoRA")
    theirs.get_base_model().config._experts_implementation = "eager"
    checkpoint = import_ckpt(None, f"{place}/theirs", f"{place}/ours")
    described = load_context(checkpoint, "model")
    described.config.moe_grouped_gemm = False  # torch's isn't there in float64
    with set_up(small_runs.build_trainer(max_steps=1), described, checkpoint=checkpoint) as parallel:
        core: Any = parallel.unwrapped[0].eval()
        for parameter in core.parameters():
            parameter.requires_grad_(False)

        def ours(tokens: Any) -> Any:
            return core(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)

        found = outputs_of_both(ours, core, theirs)
        found |= {"gradients": gradients_of_both(ours, core, theirs, f"{place}/gradients")}
    small_runs.release()
    return found | steps_of_both(folder, checkpoint, theirs, described.model_transform)


def outputs_of_both(ours: Any, core: Any, theirs: Any) -> dict[str, float]:
    """The largest difference of a logit: in fp32, of the base alone, and in float64."""
    tokens = small_runs.global_batch(0, 4)["tokens"]
    with torch.no_grad():
        wanted = logits_of(theirs)
        found = {"largest": float(wanted.abs().max()), "in fp32": float((ours(tokens) - wanted).abs().max())}
        with in_float64(core, theirs):
            found["in float64"] = float((ours(tokens) - logits_of(theirs)).abs().max())
    return found


def gradients_of_both(ours: Any, core: Any, theirs: Any, place: str) -> dict[str, float]:
    """Relative differences of gradients by parameter of ours. Theirs take the adapters' place in a folder, and are imported."""

    from nemo2.hugging_face.stored import StoredTensors
    from nemo2.models.conversion.table import Entry

    mine = {name: parameter for name, parameter in core.named_parameters() if ".adapter." in name}
    for parameter in mine.values():
        parameter.requires_grad_(True)
    backward(ours, 1)
    backward(lambda tokens: theirs(tokens).logits, 1)
    kept = {name: one.detach().clone() for name, one in theirs.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for name, one in theirs.named_parameters():
            if name in kept:
                one.copy_(one.grad)
    theirs.save_pretrained(f"{place}/theirs")
    with torch.no_grad():
        for name, one in theirs.named_parameters():
            if name in kept:
                one.copy_(kept[name])
    theirs.zero_grad()
    stored = StoredTensors(import_ckpt(None, f"{place}/theirs", f"{place}/ours") / "weights")
    found = {}
    for name, parameter in mine.items():
        shape = tuple(parameter.shape)
        wanted = stored.values(Entry(key=f"module.{name}", shape=shape, at=(), pieces=()))
        found[name] = float((parameter.grad - wanted).norm() / wanted.norm())
    assert len(found) == len(stored.tensors)
    return found


def steps_of_both(folder: str, checkpoint: Path, theirs: Any, method: Any) -> dict[str, Any]:
    from nemo2.checkpoint.auto_resume import RestoreConfig

    model = model_of(folder, rate=RATE, moe_aux_loss_coeff=0.0)  # transformers' loss has no such term unless asked
    model.model_transform = method
    run = small_runs.fit(model, max_steps=STEPS, restore_config=RestoreConfig(path=str(checkpoint)))
    small_runs.release()
    return {"ours": run["losses"], "theirs": steps(theirs, STEPS, rate=RATE)}


@contextmanager
def in_float64(core: Any, theirs: Any) -> Iterator[None]:
    """Inside, both models are in float64, and so is what transformers' computes in fp32 on purpose (norms, softmax, routing)."""

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    modeling: Any = sys.modules[type(theirs.get_base_model()).__module__]
    core.double()
    theirs.double()
    modeling.torch = Torch()
    try:
        yield
    finally:
        modeling.torch = torch
        core.float()
        theirs.float()


def all_compared(directory: str, names: list[str]) -> dict[str, Any]:
    small_runs.quiet()
    return {name: compared(directory, name) for name in names}


@pytest.fixture(scope="module")
def runs(request, run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    folder, names = str(tmp_path_factory.mktemp("as peft")), nightly.requested(request, "name")
    return run_on_ranks(all_compared, 1, folder, names, timeout=300)[0]


@pytest.mark.parametrize("name", nightly.each_case(CASES, DAILY))
def test_outputs_gradients_and_ten_steps_are_the_same(runs, name):
    """In float64 to the last digits, but for a router's probabilities, which Megatron-Core has in fp32. In fp32 the sums of both
    models are rounded in another order, the base's too."""
    found = runs[name]
    assert found["in float64"] < (1e-6 if EXPERTS & {name.partition(",")[0]} else 1e-12)
    assert found["in fp32"] < 3e-6
    assert found["gradients"] and max(found["gradients"].values()) < 1e-4, found["gradients"]
    assert len(set(found["ours"])) == STEPS
    assert found["ours"] == pytest.approx(found["theirs"], rel=1e-5)
