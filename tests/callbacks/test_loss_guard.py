# SPDX-License-Identifier: Apache-2.0
"""A loss that isn't a number, or jumps, changes no parameter and no checkpoint."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

import nemo2 as nl
from nemo2.base.errors import RuntimeFault
from nemo2.callbacks import LossGuard
from support import small_runs

NAN = float("nan")


class Disturb(pl.Callback):
    """Before the guard looks: the loss of some steps is replaced; NaN gradients of a backward or a NaN parameter in others."""

    def __init__(self, losses: dict[int, float] | None = None, gradients: int = -1, parameters: int = -1) -> None:
        self.losses, self.gradients, self.parameters = losses or {}, gradients, parameters
        self.digests: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step + 1 == self.gradients:
            parameter = next(trainer.model.parameters())
            self._spoiled = parameter.register_hook(lambda gradient: gradient * NAN)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        self.rates.append(optimizer.param_groups[0]["lr"])
        if step in self.losses:
            trainer.strategy._last_loss = trainer.strategy._last_loss * 0 + self.losses[step]
        if step == self.gradients:
            self._spoiled.remove()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.digests.append(sum(float(value.double().sum()) for value in small_runs.parameters(trainer).values()))
        if trainer.global_step == self.parameters:
            next(trainer.model.parameters()).data.fill_(NAN)


def run(
    guard: LossGuard, *more: Any, steps: int = 4, precision: Any = "32", **disturb: Any
) -> tuple[list[float], list[int], str, list[float]]:
    """Digests of the parameters after each step, the steps skipped, how it ended, and the learning rates."""
    from megatron.core.distributed import DistributedDataParallelConfig

    disturbing = Disturb(**disturb)
    try:
        model = small_runs.build_llama(schedule=small_runs.cosine(10))
        # The gradients are checked as by all shipped recipes.
        checked = DistributedDataParallelConfig(check_for_nan_in_grad=True)
        callbacks = [disturbing, guard, *more]
        small_runs.fit(model, max_steps=steps, callbacks=callbacks, ddp=checked, precision=precision)
    except RuntimeFault as error:
        return disturbing.digests, guard.skipped, str(error), disturbing.rates
    return disturbing.digests, guard.skipped, "", disturbing.rates


def guarded(directory: str) -> dict[str, Any]:
    from nemo2.checkpoint.directory import finished

    def keep(name: str) -> Any:
        return small_runs.keep(f"{directory}/{name}", every_n_train_steps=1, save_top_k=0, save_last=True)

    found: dict[str, Any] = {"undisturbed": run(LossGuard())}
    found["stop"] = run(LossGuard(), keep("stop"), losses={3: NAN})
    found["skip"] = run(LossGuard(on_nonfinite="skip"), losses={3: NAN})
    found["gradients"] = run(LossGuard(on_nonfinite="skip"), gradients=3)
    found["spike"] = run(LossGuard(on_spike="skip", window=2), losses={3: 1e3})
    found["too many"] = run(LossGuard(on_nonfinite="skip", max_skips=1), losses={2: NAN, 3: NAN})
    overflowing = nl.MegatronMixedPrecision("16-mixed", fp16_initial_loss_scale=2.0**24, fp16_hysteresis=1)
    found["fp16"] = run(LossGuard(on_nonfinite="skip", max_skips=1), steps=20, precision=overflowing)
    found["parameters"] = run(LossGuard(), keep("parameters"), parameters=2)
    found["left"] = {
        name: [manifest.step for _, manifest in finished(Path(directory) / name)] for name in ("stop", "parameters")
    }
    return found


@pytest.fixture(scope="module")
def found(run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    return run_on_ranks(guarded, 1, str(tmp_path_factory.mktemp("guarded")))[0]


@pytest.mark.quick
def test_stopping_leaves_parameters_and_checkpoints_of_the_step_before(found):
    digests, _, ended, _ = found["stop"]
    assert digests == found["undisturbed"][0][:2]
    assert "Step 3: the loss is nan" in ended
    assert found["left"]["stop"] == [2]


@pytest.mark.parametrize("name", ["skip", "gradients", "spike"])
def test_a_skipped_step_changes_no_parameter_and_the_next_one_does(found, name):
    digests, skipped, ended, rates = found[name]
    assert ended == ""
    assert skipped == [3]
    assert digests[:2] == found["undisturbed"][0][:2]
    assert digests[2] == digests[1]
    assert digests[3] != digests[2]
    assert rates == [*found["undisturbed"][3][:3], found["undisturbed"][3][2]], "the schedule waits too"


def test_gradients_that_overflow_under_a_loss_scale_are_the_scalers(found):
    digests, skipped, ended, _ = found["fp16"]
    assert ended == "" and skipped == []
    assert digests[0] == digests[1] != digests[-1], "the scale was too large in the first steps only"


def test_too_many_skips_in_a_row_end_the_run(found):
    _, skipped, ended, _ = found["too many"]
    assert skipped == [2]
    assert "as in the 1 steps before it" in ended


def test_parameters_that_are_not_finite_are_never_saved(found):
    _, _, ended, _ = found["parameters"]
    assert "some parameters aren't finite" in ended and "is not saved" in ended
    assert found["left"]["parameters"] == [1]


def test_a_guard_resumes_with_what_it_had_seen():
    guard, other = LossGuard(on_spike="skip", window=3), LossGuard(on_spike="skip", window=3)
    guard._losses.extend([1.0, 2.0, 3.0])
    guard.skipped.append(7)
    other.load_state_dict(guard.state_dict())
    assert other._judge(4.1) == guard._judge(4.1) != (None, None)
    assert other._judge(3.9) == (None, None)
    assert other.skipped == [7]
    for one in (guard, other):
        one._losses.append(6.0)
    assert other._judge(6.1) == guard._judge(6.1) != (None, None)
