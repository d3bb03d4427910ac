# SPDX-License-Identifier: Apache-2.0
"""Transforms of a model before it is wrapped: what they see, what they freeze, and that every layout trains the same."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from support import small_runs, transforms

STEPS = 3
DEEP = {"num_layers": 4, "num_query_groups": 4}
EXPERTS = DEEP | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
# Only the last layers have an addition: the others' tensors would be missing from a stack of layers.
DENSE = ("layers.2.self_attention.linear_qkv", "layers.3.self_attention.linear_qkv")
EVERY_LAYER = (".linear_qkv",)
RECOMPUTED: dict[str, dict[str, Any]] = {
    "kept": {},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}
OF_EXPERTS = (*DENSE, ".linear_fc1")
RESUMED = ("tp2 sp", "pp2", "fsdp1", "fsdp2", "mfsdp")
ADDED = re.compile(r"linear_\w+\.[ab]\b")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2 vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "do": {},
    "fsdp2": {},
    "fsdp1": {},
    "mfsdp": {"fsdp": "megatron"},
}


def train(
    directory: str,
    name: str = "",
    *,
    wrapped: tuple[str, ...] = (),
    save: bool = False,
    resume: str | None = None,
    transform: Any = None,
    base: bool = True,
    callback: bool = False,
    strategy: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """``STEPS`` steps of a model whose weights come from ``base`` in the directory; losses, and how parameters changed."""
    import nemo2 as nl
    import nemo2.callbacks
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    small_runs.release()
    model = small_runs.build_llama(
        distributed=name in ("do", "mfsdp"), schedule=small_runs.cosine(8), **(DEEP | config)
    )
    transform = transform if transform is not None else transforms.FreezeAndAdd(*wrapped)
    model.model_transform = None if callback else transform
    options = dict(strategy if strategy is not None else LAYOUTS.get(name, {}))
    if base and not resume:
        options["restore_config"] = RestoreConfig(path=f"{directory}/base")
    if name in ("fsdp1", "fsdp2"):
        options = {"strategy": {"fsdp1": nl.FSDPStrategy, "fsdp2": nl.FSDP2Strategy}[name](**options)}
    before: dict[str, torch.Tensor] = {}
    found: dict[str, Any] = {"seen": getattr(transform, "seen", [])}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.update(_values(trainer))
            found["counts"] = tuple(trainer.strategy.megatron_parallel.parameter_counts)

    callbacks: list[Any] = [Watch(), *([nl.callbacks.ModelTransform(transform)] if callback else [])]
    if save:
        keep = ModelCheckpoint(
            dirpath=f"{directory}/{name or 'one'}", save_optim_on_train_end=True, filename="{step}", save_last=False
        )
        callbacks.append(keep)
    found |= small_runs.fit(
        model, max_steps=8 if resume else STEPS, callbacks=callbacks, ckpt_path=resume, inspect=_values, **options
    )
    after = found.pop("inspected")
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    found["changed"], found["same"] = sorted(changed), sorted(after.keys() - changed)
    return found


def _values(trainer: Any) -> dict[str, torch.Tensor]:
    """Of every parameter this rank's values; of those that no longer have their names, torch's pieces."""
    strategy = trainer.strategy
    if hasattr(strategy, "_stored") or strategy.fsdp:
        return {
            f"{piece.key}{piece.offset}": piece.tensor.detach().clone() for piece in strategy._pieces(optimizer=False)
        }
    return small_runs.parameters(trainer)


def base(directory: str, **config: Any) -> None:
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    model = small_runs.build_llama(**(DEEP | config))
    keep = ModelCheckpoint(dirpath=directory, filename="base", save_last=False, save_optim_on_train_end=True)
    small_runs.fit(model, max_steps=1, callbacks=[keep])


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
    if "pp2" in names:
        found["stepwise"] = fit_and_validate(place)
        place = f"{directory}/experts"
        found["ep2"] = train(place, wrapped=OF_EXPERTS, strategy={"expert_model_parallel_size": 2}, **EXPERTS)
    return found


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
def runs(run_on_ranks, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    directory = str(tmp_path_factory.mktemp("transformed"))
    found = {"one": run_on_ranks(one_process, 1, directory)}
    found["two"] = run_on_ranks(two_ranks, 2, directory, list(LAYOUTS))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process_and_freezes_what_was_frozen(runs, name):
    expected = runs["one"][0]["dense"]
    assert len(set(expected["losses"])) == STEPS
    for rank in runs["two"]:
        run = rank[name]
        assert run["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
        assert run["counts"] == expected["counts"]
        assert run["same"] and not any(ADDED.search(key) for key in run["same"])
        assert all(ADDED.search(key) for key in run["changed"])
    assert any(rank[name]["changed"] for rank in runs["two"])


@pytest.mark.parametrize("name", RESUMED)
def test_a_layout_goes_on_from_a_checkpoint_of_one_process(runs, name):
    expected = runs["one"][0]["resumed"]
    assert runs["two"][0][f"resumed {name}"]["losses"] == pytest.approx(expected["losses"], rel=5e-5)


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


def nothing(module: nn.Module) -> Any:
    return None


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def refusals() -> dict[str, str]:
    from nemo2.callbacks import ModelTransform
    from nemo2.llm.set_up import connect_parts

    def told(**parts: Any) -> str:
        small_runs.release()
        model = small_runs.build_llama()
        model.model_transform = parts.get("of_model")
        try:
            if "given" in parts:
                connect_parts(model, small_runs.TokenData(), model_transform=parts["given"])
            small_runs.fit(model, max_steps=1, callbacks=parts.get("callbacks", ()))
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
        "all frozen": told(of_model=freeze),
    }


@pytest.fixture(scope="module")
def told(run_on_ranks) -> dict[str, str]:
    return run_on_ranks(refusals, 1)[0]


def test_two_different_transforms_are_refused_by_their_names(told):
    assert "ConfigError: model.model_transform=identity and ModelTransform.model_transform=freeze" in told["two"]
    assert "ConfigError: model_transform=freeze and model.model_transform=identity" in told["argument"]
    assert told["the same"] == "nothing"


def test_a_transform_that_cannot_work_is_refused(told):
    assert "ConfigError: ModelTransform() has nothing to apply" in told["none"]
    assert "model_transform=nothing returned NoneType for GPTModel: it must return the module" in told["no module"]
    assert "model.model_transform='lora': must be a function" in told["no function"]
    assert "parameters are frozen: there is nothing to train" in told["all frozen"]
