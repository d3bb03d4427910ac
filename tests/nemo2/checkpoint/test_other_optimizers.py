# SPDX-License-Identifier: Apache-2.0
"""State of an optimizer that one implementation or configuration saved, loaded into another."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

import nemo2 as nl
from nemo2.base.errors import CheckpointError
from nemo2.checkpoint.optimizer_forms import completed
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.optim.megatron import MegatronOptimizerModule
from nemo2.mcore.optim.pytorch import PytorchOptimizerModule
from support import small_runs


class OwnKey(torch.optim.AdamW):
    """Reads a field of its groups that torch's doesn't write, as Transformer Engine's Adam does."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for group in self.param_groups:
            group["own"] = True

    def step(self, closure: Any = None) -> Any:
        assert all(group["own"] for group in self.param_groups)
        return super().step(closure)


class Halving(OptimizerModule):
    """With a schedule of torch's that multiplies the rate of the step before."""

    makes_torch_optimizers = True

    def optimizers(self, model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]

    def __call__(self, model: Any, megatron_parallel: Any = None) -> list[dict[str, Any]]:
        [optimizer] = self.optimizers(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}]


def adamw(**settings: Any) -> OptimizerModule:
    return PytorchOptimizerModule(partial(torch.optim.AdamW, **{"lr": 0.01, "weight_decay": 0.1} | settings))


def run(path: str, optim: OptimizerModule | None = None, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Two steps that end with a checkpoint, or two further ones from it."""
    small_runs.release()
    model = small_runs.build_llama(
        distributed=options.pop("distributed", False),
        optimizer=options.pop("optimizer", None),
        **options.pop("config", {}),
    )
    if optim is not None:
        optim.connect(model)

    def inspect(trainer: Any) -> list[dict[str, Any]]:
        if not resume:
            trainer.save_checkpoint(path)
        groups = trainer.strategy.optimizers[0].param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    settings = {"max_steps": 4, "ckpt_path": path} if resume else {"max_steps": 2}
    return small_runs.fit(model, inspect=inspect, **settings, **options)


def torch_optimizers(directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    path = str(Path(directory) / "adam")
    run(path, adamw())
    changed = run(path, adamw(lr=0.03, weight_decay=0.5, betas=(0.5, 0.9)), resume=True)
    found["settings"] = [(group["weight_decay"], group["betas"]) for group in changed["inspected"]], changed["rates"]
    found["own key"] = len(run(path, PytorchOptimizerModule(OwnKey), resume=True)["losses"])
    for kind in (torch.optim.SGD, torch.optim.Adafactor):
        with pytest.raises(CheckpointError) as error:
            run(path, PytorchOptimizerModule(partial(kind, lr=0.01)), resume=True)
        found[kind.__name__] = str(error.value)
    for name in ("MegatronStrategy", "FSDP2Strategy"):
        path = str(Path(directory) / name)
        rates: list[float] = []
        for resume in (False, True):
            options = {} if name == "MegatronStrategy" else {"precision": None, "strategy": nl.FSDP2Strategy()}
            rates += run(path, Halving(), resume=resume, **options)["rates"]
        found[name] = rates
    return found


def test_settings_of_torchs_optimizers_are_the_recipes_and_another_kind_is_refused(run_on_ranks, tmp_path):
    [found] = run_on_ranks(torch_optimizers, 1, str(tmp_path))
    groups, rates = found["settings"]
    assert {decay for decay, _ in groups} == {0.5} and {betas for _, betas in groups} == {(0.5, 0.9)}
    assert rates == [0.03, 0.03]
    assert found["own key"] == 2
    assert "another optimizer than SGD" in found["SGD"] and "momentum" in found["SGD"]
    assert "another optimizer than Adafactor" in found["Adafactor"] and "beta2_decay" in found["Adafactor"]
    assert found["MegatronStrategy"] == found["FSDP2Strategy"] == [0.01, 0.005, 0.0025, 0.00125]


def loss_scales(directory: str) -> dict[str, list[float]]:
    found = {}
    for distributed in (False, True):
        path = str(Path(directory) / f"distributed={distributed}")
        constant = nl.MegatronMixedPrecision("16-mixed", fp16_loss_scale=8.0)
        dynamic = nl.MegatronMixedPrecision("16-mixed", fp16_initial_loss_scale=16.0)
        run(path, precision=constant, distributed=distributed)
        found[path] = run(path, precision=dynamic, distributed=distributed, resume=True)["scales"]
    return found


def test_a_dynamic_loss_scale_begins_after_a_constant_one(run_on_ranks, tmp_path):
    [found] = run_on_ranks(loss_scales, 1, str(tmp_path))
    assert list(found.values()) == [[16.0, 16.0]] * 2


def without_count_of_updates(directory: str) -> tuple[list[float], list[str]]:
    """SGD's losses, of the first two steps under a strategy that shards, and of the next two without it; and what is said where
    the momentum isn't used any more."""
    path, sgd = str(Path(directory) / "sgd"), {"optimizer": "sgd", "sgd_momentum": 0.9}
    before = run(path, optimizer=sgd, strategy=nl.FSDP2Strategy())
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("nemo2.checkpoint.forms").addHandler(handler)
    losses = before["losses"] + run(path, optimizer=sgd, resume=True)["losses"]
    assert not messages
    others: tuple[dict[str, Any], ...] = ({}, {"strategy": nl.FSDP2Strategy()})
    for options in others:
        run(path, optimizer=sgd | {"sgd_momentum": 0.0}, resume=True, **options)
    return losses, messages


def uninterrupted(**optimizer: Any) -> list[float]:
    return small_runs.fit(small_runs.build_llama(optimizer=optimizer), max_steps=4)["losses"]


def test_an_optimizer_that_counts_no_updates_goes_on_under_another_strategy(run_on_ranks, tmp_path):
    [(resumed, messages)] = run_on_ranks(without_count_of_updates, 1, str(tmp_path))
    [expected] = run_on_ranks(uninterrupted, 1, optimizer="sgd", sgd_momentum=0.9)
    assert len(messages) == 2 and all("momentum_buffer" in message for message in messages)
    assert resumed == pytest.approx(expected, rel=1e-6) and len(set(expected)) == 4


def with_two_rates(directory: str) -> list[float]:
    """Losses under a strategy that shards, and after it of an optimizer whose own state only its layout could load."""
    path, rates = str(Path(directory) / "rates"), {"decoupled_lr": 3e-3}
    before = run(path, optimizer=rates, strategy=nl.FSDP2Strategy())["losses"]
    after = run(path, optimizer=rates, resume=True, distributed=True, ckpt_parallel_save_optim=False)
    return before + after["losses"]


def test_embeddings_keep_their_own_rate_under_another_strategy(run_on_ranks, tmp_path):
    [resumed] = run_on_ranks(with_two_rates, 1, str(tmp_path))
    [expected] = run_on_ranks(uninterrupted, 1, decoupled_lr=3e-3)
    assert resumed == pytest.approx(expected, rel=1e-6)


def with_experts(directory: str) -> tuple[list[float], list[float]]:
    """Losses of four steps, and of a run that goes on after two. Megatron-Core chains an optimizer of the experts."""
    options: dict[str, Any] = {"expert_model_parallel_size": 2, "ckpt_parallel_save_optim": False}
    whole = small_runs.fit(small_runs.build_llama(num_moe_experts=2), max_steps=4, **options)["losses"]
    path, options = str(Path(directory) / "experts"), options | {"config": {"num_moe_experts": 2}}
    return whole, run(path, **options)["losses"] + run(path, **options, resume=True)["losses"]


def test_optimizers_that_are_not_distributed_go_on_where_they_are_saved_as_they_are(run_on_ranks, tmp_path):
    for whole, resumed in run_on_ranks(with_experts, 2, str(tmp_path)):
        assert resumed == pytest.approx(whole, rel=1e-6)


def scaled(distributed: bool) -> OptimizerModule:
    """Two groups without weight decay: the norms before attention at ten times the rate, and the others."""
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, use_distributed_optimizer=distributed)
    return MegatronOptimizerModule(
        config,
        lr_scheduler=small_runs.cosine(4),
        scale_lr_cond=lambda name, parameter: "input_layernorm" in name,
        lr_mult=10.0,
    )


def with_a_scaled_group(directory: str) -> tuple[list[float], list[float]]:
    """Losses of four steps, and of a run whose optimizer another kind goes on with after two."""
    whole = run(str(Path(directory) / "whole"), scaled(False))["losses"]
    whole += run(str(Path(directory) / "whole"), scaled(False), resume=True)["losses"]
    resumed = run(str(Path(directory) / "other"), scaled(True), distributed=True)["losses"]
    return whole, resumed + run(str(Path(directory) / "other"), scaled(False), resume=True)["losses"]


def test_only_the_scaled_group_has_its_rate_after_a_resume(run_on_ranks, tmp_path):
    [(whole, resumed)] = run_on_ranks(with_a_scaled_group, 1, str(tmp_path))
    assert resumed == pytest.approx(whole, rel=1e-6)


def test_a_group_gets_the_settings_of_its_optimizer_in_a_chain():
    """Muon with Adam for embeddings and norms, saved without an optimizer of the experts."""
    group = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}
    muon, adam = group | {"momentum": 0.9}, group | {"optimizer": "adam", "betas": (0.9, 0.95)}
    saved, wanted, loaded = (
        {number: {"param_groups": [dict(one)], "state": {}} for number, one in enumerate(groups)}
        for groups in ((muon, adam), (muon, muon | {"is_expert_parallel": True}, adam), ({}, {}, {}))
    )
    found = [part["param_groups"][0] for part in completed(loaded, wanted, saved).values()]
    assert found == [muon, muon | {"is_expert_parallel": True}, adam]
