# SPDX-License-Identifier: Apache-2.0
"""Gradients that aren't numbers end a run with an error of ours, which says what to do."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo2.base.errors import RuntimeFault
from nemo2.training.strategies.metrics import nonfinite_gradients
from support import sharded_runs, small_runs


class Poison(pl.Callback):
    """Makes a parameter NaN before the second step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                next(iter(pl_module.parameters())).fill_(float("nan"))


class PoisonGradients(pl.Callback):
    """Makes this rank's gradients of a parameter NaN in the second step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            next(trainer.model.parameters()).grad.to_local().fill_(float("nan"))


def poisoned(callback: pl.Callback, **options: Any) -> str:
    with pytest.raises(RuntimeFault) as caught:
        small_runs.fit(small_runs.build_llama(distributed=bool(options)), max_steps=3, callbacks=[callback], **options)
    return str(caught.value)


def poisoned_shards() -> str:
    return poisoned(PoisonGradients(), strategy=sharded_runs.strategies()["FSDP2Strategy"]())


def test_what_megatron_core_finds_is_told_with_the_step_and_advice(run_on_ranks):
    said = run_on_ranks(poisoned, 1, Poison())[0]
    assert said.startswith("Step 2: this rank's gradients aren't finite (NaN).")
    assert "optim.config.lr" in said and "LossGuard" in said and "iteration -1" not in said


def test_a_sharded_model_is_not_updated_with_such_gradients(run_on_ranks):
    said = run_on_ranks(poisoned_shards, 1)[0]
    assert "their norm is nan" in said and "LossGuard" in said


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match="no memory"), nonfinite_gradients(3):
        raise RuntimeError("no memory")
