# SPDX-License-Identifier: Apache-2.0
"""Torch's optimizers as objects of a recipe: groups, schedules, and the same weights as torch's own loop."""

from functools import partial
from typing import Any

import fiddle
import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nemo2.base.errors import ConfigError
from nemo2.config.reading import from_json
from nemo2.config.serialize import to_json
from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler
from nemo2.mcore.optim.pytorch import PytorchOptimizerModule
from nemo2.recipes.optim import adam, sgd
from support import small_runs


def test_parameters_are_grouped_by_what_decays_and_what_is_scaled() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[1].weight.requires_grad_(False)
    made = PytorchOptimizerModule(
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
        scale_lr_cond=lambda name, parameter: name.startswith("1."),
        lr_mult=10.0,
    )
    [optimizer] = made.optimizers(model)
    assert [(group["weight_decay"], group["lr"], len(group["params"])) for group in optimizer.param_groups] == [
        (0.5, 0.1, 1), (0.0, 0.1, 1), (0.0, 1.0, 1),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="lr_mult=2 has no effect"):
        PytorchOptimizerModule(torch.optim.SGD, lr_mult=2)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        made.optimizers(model)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (adam.pytorch_adam_with_cosine_annealing, {"lr": 1e-5, "weight_decay": 0.01, "foreach": False, "min_lr": 1e-6}),
        (adam.pytorch_adam_with_flat_lr, {"lr": 1e-5, "weight_decay": 0.01, "foreach": True}),
        (adam.te_adam_with_cosine_annealing, {"lr": 1e-5, "master_weights": True, "min_lr": 1e-6}),
        (adam.te_adam_with_flat_lr, {"lr": 1e-5, "weight_decay": 0.01}),
        (sgd.pytorch_sgd_with_cosine_annealing, {"lr": 1e-5, "weight_decay": 1e-4, "min_lr": 1e-6}),
        (sgd.pytorch_sgd_with_flat_lr, {"lr": 1e-5, "weight_decay": 1e-4}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_factories_have_nemos_defaults_and_travel_as_text(make: Any, expected: dict[str, Any]) -> None:
    made = make()
    assert from_json(to_json(made)) == made, "read back as from a stranger"
    found = {**made.optimizer_fn.__arguments__, **getattr(made.lr_scheduler, "__arguments__", {})}
    assert {name: pytest.approx(value) for name, value in expected.items()} == {name: found[name] for name in expected}
    if make.__name__.startswith("te_"):
        with pytest.raises(ConfigError, match="requires Transformer Engine"):
            fiddle.build(made).optimizers(nn.Linear(1, 1))
    else:
        assert isinstance(fiddle.build(made).optimizers(nn.Linear(1, 1))[0], torch.optim.Optimizer)


X = torch.arange(24.0).reshape(6, 4).sin()
STEPS = 3


class Own(pl.LightningModule):
    """A model of a user's own, as NeMo's MNIST example is: no optimizer, and no steps but Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        # Of the same sample each rank sees another, without a sampler that shuffles.
        return self.net(batch[0] + self.global_rank).square().mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(X), batch_size=1)


def module() -> PytorchOptimizerModule:
    schedule = CosineAnnealingScheduler(warmup_steps=2, constant_steps=0, min_lr=0.01)
    return PytorchOptimizerModule(partial(torch.optim.SGD, lr=0.3, weight_decay=0.1), schedule)


def trained(ddp: Any = "megatron") -> tuple[dict[str, torch.Tensor], list[float]]:
    model = Own()
    module().connect(model)
    assert isinstance(model.optim, PytorchOptimizerModule)
    recorder = small_runs.Recorder()
    trainer = small_runs.build_trainer(
        max_steps=STEPS, callbacks=[recorder], ddp=ddp, trainer={"use_distributed_sampler": False}
    )
    trainer.fit(model)
    return {name: value.detach().cpu() for name, value in model.net.named_parameters()}, recorder.rates


def test_a_run_of_two_ranks_steps_as_torch_alone_does(run_on_ranks) -> None:
    model = Own()
    optim = module()
    optim.schedule_over(STEPS)
    [entry] = optim(model)
    optimizer, schedule = entry["optimizer"], entry["lr_scheduler"]["scheduler"]
    rates = []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        model.net(torch.cat([X[step : step + 1], X[step : step + 1] + 1])).square().mean().backward()
        optimizer.step()
        schedule.step()
    for weights, seen in run_on_ranks(trained, 2):
        assert seen == pytest.approx(rates)
        for name, value in model.net.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


def refused() -> str:
    from megatron.core.distributed import DistributedDataParallelConfig

    with pytest.raises(ConfigError) as error:
        trained(DistributedDataParallelConfig(use_distributed_optimizer=True))
    return str(error.value)


def test_sharded_state_is_refused(run_on_ranks) -> None:
    assert "use_distributed_optimizer=True shards the state" in run_on_ranks(refused, 1)[0]
