# SPDX-License-Identifier: Apache-2.0
"""A loop of the user's own through Fabric gives the losses that Trainer gives, on real ranks of every kind."""

from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

import nemo2 as nl
from nemo2.base.errors import ConfigError
from nemo2.training.fabric import to_fabric
from support import small_runs
from support.nightly import each_case

STEPS = 3


def by_trainer(path: str = "", **layout: Any) -> dict[str, Any]:
    distributed = layout.pop("distributed", False)
    model = small_runs.build_llama(distributed=distributed, schedule=small_runs.cosine(STEPS))
    return small_runs.fit(model, max_steps=STEPS, **layout)


def fabric_with(**layout: Any) -> Any:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    small_runs.quiet()
    return nl.Fabric(devices=world, strategy=nl.FabricMegatronStrategy(**layout), precision="32")


def own_loop(fabric: Any, model: Any, *, steps: int = STEPS, load: str = "") -> dict[str, Any]:
    """A plain loop, as a user writes it."""
    fabric.launch()
    data = fabric.setup_datamodule(small_runs.TokenData())
    parallel, optimizer, schedule = fabric.setup(model, model.optim)
    remainder = fabric.load(load, {"model": parallel, "optimizer": optimizer}) if load else {}
    losses, norms, rates = [], [], []
    done = fabric.strategy.trainer.global_step
    for batch in islice(fabric.setup_dataloaders(data.train_dataloader()), steps - done):
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(float(parallel.training_step(batch)))
        optimizer.step()
        schedule.step()
        norms.append(optimizer.grad_norm)
    return {
        "losses": losses,
        "grad_norms": norms,
        "rates": rates,
        "remainder": remainder,
        "kept": (parallel, optimizer),
    }


def by_fabric(**layout: Any) -> dict[str, Any]:
    distributed = layout.pop("distributed", False)
    model = small_runs.build_llama(distributed=distributed, schedule=small_runs.cosine(STEPS))
    found = own_loop(fabric_with(**layout), model)
    del found["kept"]
    return found


LAYOUTS = {
    "DP 2": {},
    "DP 2, sharded state": {"distributed": True},
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
}


@pytest.mark.parametrize("name", each_case(LAYOUTS, list(LAYOUTS)[1:]))
def test_a_loop_of_ones_own_trains_as_the_trainer_does(run_on_ranks, name):
    layout = LAYOUTS[name]
    expected = run_on_ranks(partial(by_trainer, **layout), 2)
    found = run_on_ranks(partial(by_fabric, **layout), 2)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"] and len(mine["losses"]) == STEPS
        assert mine["grad_norms"] == theirs["grad_norms"] and mine["rates"] == theirs["rates"]


def saved_and_continued(path: str) -> list[list[float]]:
    """Two steps and a checkpoint; a new Fabric goes on from it; and a third with its weights alone, evaluated."""
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2}

    def model() -> Any:
        return small_runs.build_llama(schedule=small_runs.cosine(STEPS))

    fabric = fabric_with(**layout)
    first = own_loop(fabric, model(), steps=2)
    parallel, optimizer = first.pop("kept")
    fabric.save(path, {"model": parallel, "optimizer": optimizer, "note": "mine"})
    parallel.eval()
    batch = small_runs.global_batch(5)
    seen = float(parallel.validation_step(batch))
    again = own_loop(fabric_with(**layout), model(), load=path)
    del again["kept"]
    other = fabric_with(**layout)
    other.setup_datamodule(small_runs.TokenData())  # the same micro-batches, and so the same order of sums
    loaded = other.load_model(path)
    loaded.eval()
    assert again["remainder"] == {"note": "mine"}
    return [first["losses"] + again["losses"], [seen], [float(loaded.validation_step(batch))]]


def test_a_checkpoint_continues_bit_by_bit_and_a_model_is_read_from_it(run_on_ranks, tmp_path):
    expected = run_on_ranks(partial(by_trainer, tensor_model_parallel_size=2), 2)[0]["losses"]
    losses, seen, loaded = run_on_ranks(saved_and_continued, 2, str(tmp_path / "step=2"))[0]
    assert losses == expected
    assert seen == loaded


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def rates_of_two_loops(path: str) -> tuple[list[float], list[float], int]:
    """The rates of a loop of six steps, and of one that goes on in another Fabric after two."""

    def loop(*, steps: int, load: str = "", save: str = "") -> tuple[list[float], int]:
        fabric, model = fabric_with(), small_runs.build_llama(schedule=small_runs.cosine(6))
        fabric.launch()
        parallel, optimizer, schedule = fabric.setup(model, model.optim)
        counter = Counter(steps if save else 0)
        state = {"model": parallel, "optimizer": optimizer, "counter": counter}
        if load:
            fabric.load(load, state)
        rates = []
        for step in range(fabric.strategy.trainer.global_step, steps):
            rates.append(optimizer.param_groups[0]["lr"])
            parallel.training_step(small_runs.global_batch(step))
            optimizer.step()
            schedule.step()
        if save:
            with pytest.raises(ConfigError, match="'other' is a module, Linear, beside the model"):
                fabric.save(save, state | {"other": torch.nn.Linear(1, 1)})
            fabric.save(save, state)
        small_runs.release()
        return rates, counter.count

    whole, _ = loop(steps=6)
    before, _ = loop(steps=2, save=path)
    after, count = loop(steps=6, load=path)
    return whole, before + after, count


def test_a_schedule_goes_on_with_its_optimizer_and_objects_load_their_state(run_on_ranks, tmp_path):
    [(whole, parts, count)] = run_on_ranks(rates_of_two_loops, 1, str(tmp_path / "step=2"))
    assert parts == whole and len(set(whole)) == 6
    assert count == 2


def test_a_trainer_becomes_a_fabric_of_the_same_layout_and_precision():
    trainer = nl.Trainer(
        devices=1,
        strategy=nl.MegatronStrategy(sequence_parallel=False),
        plugins=nl.MegatronMixedPrecision("bf16-mixed"),
    )
    fabric = trainer.to_fabric()
    assert isinstance(fabric, nl.Fabric) and isinstance(fabric.strategy, nl.FabricMegatronStrategy)
    assert isinstance(fabric.strategy.precision, nl.FabricMegatronMixedPrecision)
    assert fabric.strategy.precision.dtype_config.params_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="FabricMegatronStrategy has no ckpt_parallel_load"):
        nl.Trainer(devices=1, strategy=nl.MegatronStrategy(ckpt_parallel_load=False)).to_fabric()
    with pytest.raises(ConfigError, match="has no counterpart"):
        nl.Trainer(devices=1, strategy=nl.FSDP2Strategy()).to_fabric()


def test_a_strategy_and_a_precision_become_those_of_a_fabric():
    strategy = to_fabric(nl.MegatronStrategy(tensor_model_parallel_size=2, sequence_parallel=True))
    assert isinstance(strategy, nl.FabricMegatronStrategy)
    assert (strategy.tensor_model_parallel_size, strategy.sequence_parallel) == (2, True)
    precision = to_fabric(nl.MegatronMixedPrecision("16-mixed"))
    assert isinstance(precision, nl.FabricMegatronMixedPrecision) and precision.precision == "16-mixed"
    with pytest.raises(ConfigError, match="object has no counterpart"):
        to_fabric(object())


def groups_alone() -> bool:
    from megatron.core import parallel_state

    small_runs.build_trainer(max_steps=1).strategy.setup_environment()
    return parallel_state.model_parallel_is_initialized()


def test_a_strategy_sets_its_groups_up_before_there_is_a_model(run_on_ranks):
    assert run_on_ranks(groups_alone, 1) == [True]


def test_what_a_loop_need_not_do_is_said():
    fabric = nl.Fabric(devices=1, strategy=nl.FabricMegatronStrategy())
    with pytest.raises(ConfigError, match="has already run the backward pass"):
        fabric.backward(torch.zeros(()))
    with pytest.raises(ConfigError, match="clip_grad"):
        fabric.clip_gradients(None, None)
    with pytest.raises(ConfigError, match="one OptimizerModule"):
        fabric.setup(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1))
    with pytest.raises(ConfigError, match=r"output_data_idx=True\): must be False"):
        nl.FabricMegatronStrategy(output_data_idx=True)
    with pytest.raises(ConfigError, match="no longer supports it"):
        nl.FabricMegatronStrategy(moe_extended_tp=True)
