# SPDX-License-Identifier: Apache-2.0
"""The loss that validation and tests report: the mean over every token that counts, whatever the batches are."""

import contextlib
import io
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import nemo2 as nl
from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.training.run_dir.progress_line import parse_line
from support import small_runs

SAMPLES = 6


class Data(small_runs.TokenData):
    def __init__(self, global_batch_size: int) -> None:
        super().__init__(micro_batch_size=1, global_batch_size=global_batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(small_runs.Tokens(SAMPLES))

    test_dataloader = val_dataloader


class KeepsAll(llm.LlamaModel):
    @cached_property
    def validation_loss_reduction(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return llm.MaskedTokenLossReduction(validation_step=True, val_drop_last=False)


class OfTheirOwn(llm.MaskedTokenLossReduction):
    """Says nothing of what its value is a mean over."""

    def reduce(self, losses_reduced_per_micro_batch: Any) -> Any:
        value = super().reduce(losses_reduced_per_micro_batch)
        self.weight = None
        return value


class KeepsAllByItsOwn(llm.LlamaModel):
    def loss_reduction(self, model: Any) -> Any:
        return OfTheirOwn(val_drop_last=False)


class KeepsAllByTheModelsMask(llm.LlamaModel):
    """Keeps tokens that the batch's mask leaves out, of the samples that fill the last global batch too."""

    def forward_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward_step(batch), self.mask_of(batch)

    def mask_of(self, batch: Any) -> torch.Tensor:
        return (batch["labels"] % 3 == 0).float()

    @cached_property
    def validation_loss_reduction(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return llm.MaskedTokenLossReductionWithLossMask(validation_step=True, val_drop_last=False)


def plain_loss(model: Any, first: int, last: int) -> float:
    """The mean loss of all kept tokens of the samples from first up to last, by plain PyTorch from the model's logits."""
    batch = small_runs.on_device(small_runs.global_batch(0, size=last))
    batch = {name: value[first:] for name, value in batch.items()}
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"]).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = (model.mask_of(batch) if isinstance(model, KeepsAllByTheModelsMask) else batch["loss_mask"]).flatten()
    return float((loss * mask).sum() / mask.sum())


def evaluated() -> dict[str, Any]:
    def run(kind: type, global_batch_size: int, verb: str) -> tuple[float, list[float], list[str]]:
        small_runs.quiet()
        torch.manual_seed(0)
        model = small_runs.build_llama()
        trainer = nl.Trainer(
            devices=2, strategy=nl.MegatronStrategy(), plugins=nl.MegatronMixedPrecision("32"), limit_val_batches=1.0
        )
        model = kind(model.config, optim=model.optim)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            [metrics] = getattr(trainer, verb)(model, Data(global_batch_size), verbose=False)
        lines = [line for line in said.getvalue().splitlines() if "epoch" in line]
        found = float(metrics["val_loss" if verb == "validate" else "test_loss"])
        result = found, [plain_loss(model, *samples) for samples in ((0, SAMPLES), (0, 4), (4, SAMPLES))], lines
        small_runs.release()
        return result

    return {
        **{f"all {size}": run(KeepsAll, size, "validate") for size in (2, 4, 8)},
        "dropped": run(llm.LlamaModel, 4, "validate"),
        "tested": run(KeepsAll, 4, "test"),
        "the model's mask": run(KeepsAllByTheModelsMask, 4, "validate"),
        "own reduction": run(KeepsAllByItsOwn, 4, "validate"),
        "own reduction, tested": run(KeepsAllByItsOwn, 4, "test"),
    }


@pytest.fixture(scope="module")
def found(run_on_ranks: Any) -> dict[str, Any]:
    return run_on_ranks(evaluated, 2)[0]


@pytest.mark.parametrize("case", ["all 2", "all 4", "all 8", "tested", "the model's mask"])
def test_every_kept_token_counts_once_whatever_the_global_batch(found, case):
    loss, (whole, _, _), _ = found[case]
    assert loss == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("case", ["own reduction", "own reduction, tested"])
def test_batches_of_a_reduction_without_a_weight_count_by_their_samples(found, case):
    loss, (_, first_four, last_two), _ = found[case]
    assert loss == pytest.approx((4 * first_four + 2 * last_two) / SAMPLES, rel=1e-6)


def test_the_last_batch_is_left_out_unless_asked_for(found):
    loss, (whole, first_four, _), _ = found["dropped"]
    assert loss == pytest.approx(first_four, rel=1e-5) and abs(loss - whole) > 1e-5


def test_a_test_has_a_line_of_its_own(found):
    [line] = found["tested"][2]
    parsed = parse_line(line)
    assert parsed is not None and parsed.stage == "Test"
    assert parsed.metrics["test_loss"] == pytest.approx(found["tested"][0], rel=1e-3)


def under_another_strategy(name: str) -> str:
    small_runs.quiet()
    trainer = pl.Trainer(
        strategy=name, accelerator="cpu", devices=1, max_steps=1, logger=False, enable_progress_bar=False
    )
    try:
        trainer.fit(small_runs.build_llama(), DataLoader(small_runs.Tokens(2)))
    except ConfigError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("name", ["ddp", "auto"])
def test_a_gpt_under_lightnings_own_strategies_says_what_it_needs(run_on_ranks, name):
    [told] = run_on_ranks(under_another_strategy, 1, name)
    assert told.startswith("LlamaModel consists of Megatron-Core layers") and "Use strategy=MegatronStrategy()" in told
