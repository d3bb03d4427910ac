# SPDX-License-Identifier: Apache-2.0
"""Transforms of a model before it is wrapped: what they see, what they freeze, and that every layout trains the same."""

from typing import Any

import pytest
import torch
from torch import nn

from support import small_runs, transforms
from support.nightly import daily_and_nightly
from support.transformed_runs import (
    ADDED,
    DEEP,
    DENSE,
    EVERY_LAYER,
    EXPERTS,
    LAYOUTS,
    OF_EXPERTS,
    RECOMPUTED,
    RESUMED,
    STEPS,
    base,
    train,
)


def one_process(directory: str) -> dict[str, Any]:
    found = {}
    for kind, config, wrapped in (("dense", {}, DENSE), ("experts", EXPERTS, OF_EXPERTS)):
        base(f"{directory}/{kind}", **config)
        found[kind] = train(f"{directory}/{kind}", wrapped=wrapped, save=kind == "dense", **config)
        small_runs.release()
    place = f"{directory}/dense"
    found["resumed"] = train(place, wrapped=DENSE, resume=f"{place}/one/step={STEPS}")
    for kind, recompute in RECOMPUTED.items():
        found[kind] = train(place, wrapped=EVERY_LAYER, **recompute)
    found["whole"] = train(place, transform=transforms.freeze_all_but_norms)
    found["callback"] = train(place, callback=True, wrapped=DENSE)
    return found


def two_ranks(directory: str, names: list[str]) -> dict[str, Any]:
    """Each layout from the weights of one process, and on from its checkpoint."""
    found: dict[str, Any] = {}
    place = f"{directory}/dense"
    for name in names:
        found[name] = train(place, name, wrapped=DENSE)
        if name in RESUMED:
            found[f"resumed {name}"] = train(place, name, wrapped=DENSE, resume=f"{place}/one/step={STEPS}")
    return found


def stages_and_experts(directory: str) -> dict[str, Any]:
    found = {"stepwise": fit_and_validate(f"{directory}/dense")}
    experts = {"strategy": {"expert_model_parallel_size": 2}, **EXPERTS}
    return found | {"ep2": train(f"{directory}/experts", wrapped=OF_EXPERTS, **experts)}


def fit_and_validate(place: str) -> dict[str, Any]:
    """A trainer that validates what it has just trained, in two pipeline stages of two chunks each."""
    small_runs.release()
    model = small_runs.build_llama(**DEEP)
    transform = model.model_transform = transforms.FreezeAndAdd(*DENSE)
    recorder = small_runs.Recorder()
    trainer = small_runs.build_trainer(
        max_steps=2,
        callbacks=[recorder],
        trainer={"limit_val_batches": 1, "val_check_interval": 2},
        **LAYOUTS["pp2 vp2"],
    )
    data = small_runs.TokenData()
    trainer.fit(model, data)
    trained = small_runs.parameters(trainer)
    trainer.validate(model, data, verbose=False)
    same = [torch.equal(value, trained[name]) for name, value in small_runs.parameters(trainer).items()]
    return {"losses": recorder.val_losses, "same": same, "calls": len(transform.seen) - len(set(transform.seen))}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("transformed"))


@pytest.fixture(scope="module")
def one(run_on_ranks, directory) -> dict[str, Any]:
    return run_on_ranks(one_process, 1, directory)[0]


@pytest.fixture(scope="module")
def runs(run_on_ranks, directory, one) -> dict[str, list[dict[str, Any]]]:
    return {"one": [one], "two": run_on_ranks(stages_and_experts, 2, directory)}


# LoRA is a transform too, and runs in the others every day (tests/nemo2/models/peft/test_layouts.py).
@pytest.mark.parametrize("names", daily_and_nightly(LAYOUTS, ["pp2 vp2", "fsdp1", "mfsdp"]))
def test_every_layout_trains_and_goes_on_as_one_process_and_freezes_what_was_frozen(
    run_on_ranks, directory, one, names
):
    expected = one["dense"]
    assert len(set(expected["losses"])) == STEPS
    ranks = run_on_ranks(two_ranks, 2, directory, names)
    for name in names:
        for rank in ranks:
            run = rank[name]
            assert run["losses"] == pytest.approx(expected["losses"], rel=2e-5), name
            assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4), name
            assert run["counts"] == expected["counts"], name
            assert run["same"] and not any(ADDED.search(key) for key in run["same"]), name
            assert all(ADDED.search(key) for key in run["changed"]), name
        assert any(rank[name]["changed"] for rank in ranks), name
        if name in RESUMED:
            resumed = ranks[0][f"resumed {name}"]["losses"]
            assert resumed == pytest.approx(one["resumed"]["losses"], rel=5e-5), name


def test_experts_are_transformed_on_the_ranks_that_hold_them(runs):
    expected = runs["one"][0]["experts"]
    for rank in runs["two"]:
        assert rank["ep2"]["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert rank["ep2"]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
        assert rank["ep2"]["counts"] == expected["counts"]
    seen = {name for rank in runs["two"] for name in rank["ep2"]["seen"]}
    assert seen == set(expected["seen"])


def test_a_model_is_transformed_once_and_its_chunks_outlive_the_trainer_s_stages(runs):
    for rank in runs["two"]:
        found = rank["stepwise"]
        assert all(found["same"])
        assert found["losses"][0] == found["losses"][1]


def test_layers_that_are_recomputed_behind_a_frozen_embedding_are_trained(runs):
    expected = runs["one"][0]["kept"]
    assert len(expected["changed"]) == 2 * DEEP["num_layers"]
    for kind in RECOMPUTED:
        run = runs["one"][0][kind]
        assert run["changed"] == expected["changed"]
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)


def test_a_transform_of_whole_chunks_freezes_too(runs):
    run = runs["one"][0]["whole"]
    assert run["changed"] and all("norm" in key for key in run["changed"])
    assert run["same"] and not any("norm" in key for key in run["same"])


def test_the_callback_s_transform_does_what_the_model_s_does(runs):
    assert runs["one"][0]["callback"]["losses"] == runs["one"][0]["dense"]["losses"]


def identity(module: nn.Module) -> nn.Module:
    return module


def by_path(module: nn.Module, path: str) -> nn.Module:
    return module


def nothing(module: nn.Module) -> Any:
    return None


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def refusals() -> dict[str, str]:
    from nemo2.callbacks import ModelTransform
    from nemo2.training.connecting import connect_parts

    def told(**parts: Any) -> str:
        small_runs.release()
        model = small_runs.build_llama()
        model.model_transform = parts.get("of_model")
        try:
            if "given" in parts:
                connect_parts(model, small_runs.TokenData(), model_transform=parts["given"])
            small_runs.fit(model, max_steps=1, callbacks=parts.get("callbacks", ()), inspect=parts.get("inspect"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return {
        "two": told(of_model=identity, callbacks=[ModelTransform(freeze)]),
        "argument": told(of_model=identity, given=freeze),
        "the same": told(of_model=identity, given=identity, callbacks=[ModelTransform(identity)]),
        "none": told(callbacks=[ModelTransform()]),
        "no module": told(of_model=nothing),
        "no function": told(of_model="lora"),
        "another argument": told(of_model=by_path),
        "all frozen": told(of_model=freeze),
        "merged": told(of_model=transforms.FreezeAndAdd(*EVERY_LAYER), inspect=merged),
    }


def merged(trainer: Any) -> None:
    from nemo2.models.peft.adapter import merge

    merge(trainer.strategy.megatron_parallel.unwrapped[0])


@pytest.fixture(scope="module")
def told(run_on_ranks) -> dict[str, str]:
    return run_on_ranks(refusals, 1)[0]


def test_two_different_transforms_are_refused_by_their_names(told):
    assert "ConfigError: model.model_transform=identity and ModelTransform.model_transform=freeze" in told["two"]
    assert "ConfigError: model_transform=freeze and model.model_transform=identity" in told["argument"]
    assert told["the same"] == "nothing"


def test_a_transform_that_cannot_work_is_refused(told):
    assert "ConfigError: ModelTransform() has no function to apply" in told["none"]
    assert "model_transform=nothing returned NoneType for GPTModel. It must return a module" in told["no module"]
    assert "model_transform=by_path has another signature than transform(module)" in told["another argument"]
    assert "model.model_transform='lora': must be a function" in told["no function"]
    assert "parameters are frozen, so there is nothing to train" in told["all frozen"]


def test_modules_that_nemo2_cannot_merge_are_refused(told):
    assert "ConfigError: module." in told["merged"] and "only nemo2's adapters can be merged" in told["merged"]
