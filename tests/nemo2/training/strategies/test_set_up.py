# SPDX-License-Identifier: Apache-2.0
"""A model set up without a loop is the one that a loop would have run."""

from types import SimpleNamespace
from typing import Any

import pytest

from support import small_runs


def by_hand(directory: str) -> dict[str, Any]:
    from nemo2.training.strategies.set_up import set_up

    fitted = small_runs.fit(small_runs.build_llama(), max_steps=2, callbacks=[small_runs.keep(directory)])
    small_runs.release()
    found: dict[str, Any] = {"fitted": fitted["losses"], "heard": []}

    class Hears(small_runs.Recorder):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            found["heard"].append((stage, trainer.strategy.megatron_parallel))

    model, data = small_runs.build_llama(), small_runs.TokenData()
    trainer = small_runs.build_trainer(max_steps=2)
    callbacks = [Hears()]
    with set_up(trainer, model, data, stage="fit", callbacks=callbacks):
        for step in range(2):
            loss = trainer.strategy.training_step(small_runs.global_batch(step), step)
            found.setdefault("by hand", []).append(float(loss))
            trainer.strategy.optimizers[0].step()
    trained = small_runs.parameters(trainer)
    small_runs.release()
    model = small_runs.build_llama()
    trainer = small_runs.build_trainer(max_steps=2)
    with set_up(trainer, model, checkpoint=f"{directory}/step=2") as parallel:
        found["evaluates"] = not model.training and not parallel.training
        found["optimizers"] = len(trainer.strategy.optimizers)
        loaded = small_runs.parameters(trainer)
    found["loaded"] = loaded.keys() == trained.keys() and all(
        loaded[name].allclose(trained[name], atol=1e-6) for name in loaded
    )
    return found


@pytest.fixture(scope="module")
def found(run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    return run_on_ranks(by_hand, 1, str(tmp_path_factory.mktemp("checkpoints")))[0]


@pytest.mark.quick
def test_steps_by_hand_are_the_steps_of_fit(found):
    assert found["by hand"] == found["fitted"]


def test_callbacks_hear_of_it_before_there_is_a_model(found):
    assert found["heard"] == [("fit", None)]


def test_without_training_there_is_a_loaded_model_and_no_optimizer(found):
    assert found["evaluates"] and found["loaded"] and found["optimizers"] == 0


def test_a_rank_is_bound_to_the_gpu_of_its_rank_among_those_that_were_chosen(monkeypatch):
    """``devices=[1, 3]``: a process that touches the GPU of its number first takes memory on one that may be in use."""
    import torch

    from nemo2 import MegatronStrategy
    from nemo2.base.backend.cpu import CpuBackend

    class Bound(Exception):
        pass

    def bind(backend: CpuBackend, device: torch.device) -> None:
        raise Bound(device)

    monkeypatch.setattr(CpuBackend, "set_device", bind)
    strategy = MegatronStrategy()
    strategy.parallel_devices = [torch.device("cuda", 1), torch.device("cuda", 3)]
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 1, creates_processes_externally=False)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Bound, match="cuda:3"):
        strategy.setup_environment()
