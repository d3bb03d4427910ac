# SPDX-License-Identifier: Apache-2.0
"""The forms in which users write a step's parts, and MegatronParallel called with parts of one's own: real runs on ranks."""

import inspect
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.forms import reduction_of, with_model
from nemo2.mcore.parallel.loss import MegatronLossReduction
from support import small_runs


class WithModel(llm.LlamaModel):
    """As NeMo's documents write it."""

    def forward_step(self, model: Any, batch: dict[str, Any]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])


class AroundSuper(llm.LlamaModel):
    def forward_step(self, model: Any, batch: dict[str, Any]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward_step(model, batch)


class WithoutModel(llm.LlamaModel):
    """As NeMo's models write it."""

    def forward_step(self, batch: dict[str, Any]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward_step(batch)


class Doubled(llm.MaskedTokenLossReduction):
    def reduce(self, losses_reduced_per_micro_batch: Any) -> Tensor:
        return 2 * super().reduce(losses_reduced_per_micro_batch)


class OwnReduction(llm.LlamaModel):
    def loss_reduction(self, model: Any) -> MegatronLossReduction:
        assert model is self
        return Doubled()


class ReductionMethod(llm.LlamaModel):
    def training_loss_reduction(self) -> MegatronLossReduction:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Doubled()


class MaskOfTheModel(llm.LlamaModel):
    """The model keeps every token whose label three divides, whatever the batch's mask says."""

    def forward_step(self, batch: dict[str, Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward_step(batch), kept_by_the_model(batch)

    @property
    def training_loss_reduction(self) -> MegatronLossReduction:  # pyright: ignore[reportIncompatibleVariableOverride]
        return llm.MaskedTokenLossReductionWithLossMask()


def kept_by_the_model(batch: dict[str, Any]) -> Tensor:
    return (batch["labels"] % 3 == 0).float()


class BeforeTheFirstStep(pl.Callback):
    """The loss of the first global batch over what the model keeps, by plain PyTorch from the model's logits."""

    loss = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batch = small_runs.on_device(small_runs.global_batch(0))
        with torch.no_grad():
            logits = pl_module(batch["tokens"], batch["position_ids"]).float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = kept_by_the_model(batch).flatten()
        self.loss = float((each * mask).sum() / mask.sum())


def called(trainer: Any) -> dict[str, Any]:
    """`MegatronParallel` called in each documented way, after training."""
    parallel = trainer.strategy.megatron_parallel
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = small_runs.on_device(small_runs.global_batch(0))
    share = {key: value[rank::ranks] for key, value in whole.items()}
    shape = {"num_microbatches": 2, "step_i": 3}
    halves = [{key: value[: len(value) // 2] for key, value in share.items()}]
    halves += [{key: value[len(value) // 2 :] for key, value in share.items()}]
    seen: list[int] = []

    def first_token_only(iterator: Any) -> Any:
        batch = trainer.lightning_module.data_step(iterator)
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        batch["loss_mask"][:, 0] = 1
        return batch

    def forward_step(model: Any, batch: Any) -> Tensor:
        seen.append(len(batch["tokens"]))
        return model(batch["tokens"], batch["position_ids"], labels=batch["labels"])

    def cores_own(iterator: Any, chunk: Any) -> Any:
        batch = trainer.lightning_module.data_step(iterator)
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(llm.MaskedTokenLossReduction(), batch)

    def own(model: Any, batch: Any) -> Tensor:
        return forward_step(model, batch)

    with torch.no_grad():
        logits = trainer.lightning_module(whole["tokens"], whole["position_ids"]).float()
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten(), reduction="none")
    mask = whole["loss_mask"].flatten()
    first = torch.zeros_like(whole["loss_mask"])
    first[:, 0] = 1
    found = {
        "plain": float((plain * mask).sum() / mask.sum()),
        "plain first": float((plain * first.flatten()).sum() / first.sum()),
        "validation_step": float(parallel.validation_step(share, **shape)),
        "forward": float(parallel(share, **shape)),
        "iterator": float(parallel(iter(halves), **shape)),
        "data step": float(parallel(share, data_step=first_token_only, **shape)),
        "forward step": float(parallel(share, forward_step=own, **shape)),
        "reduction": float(parallel(share, loss_reduction=Doubled(), **shape)),
        "unwrapped": float(parallel(share, forward_step=cores_own, wrap_forward_step=False, **shape)),
        "seen": seen,
    }
    parallel.zero_grad_buffer()
    found["with gradients"] = float(parallel(share, forward_only=False, **shape))
    found["gradients"] = max(float(p.main_grad.abs().max()) for p in parallel.parameters())
    with pytest.raises(ConfigError, match="wrap_forward_step=False. requires a forward_step"):
        parallel(share, wrap_forward_step=False)
    return found


def runs() -> dict[str, Any]:
    def fit(kind: type, inspect: Any = None, **options: Any) -> dict[str, Any]:
        model = small_runs.build_llama()
        made = kind(model.config, optim=model.optim)
        assert made.validation_loss_reduction() is made.validation_loss_reduction
        record = small_runs.fit(made, max_steps=2, inspect=inspect, **options)
        small_runs.release()
        return record

    kinds = (llm.LlamaModel, WithModel, AroundSuper, WithoutModel, OwnReduction, ReductionMethod)
    found: dict[str, Any] = {kind.__name__: fit(kind)["losses"] for kind in kinds}
    before = BeforeTheFirstStep()
    found["mask of the model"] = fit(MaskOfTheModel, callbacks=[before])
    found["over shares of sequences"] = fit(MaskOfTheModel, context_parallel_size=2)
    return found | {"called": fit(llm.LlamaModel, called)["inspected"], "kept by the model": before.loss}


@pytest.fixture(scope="module")
def found(run_on_ranks: Any) -> dict[str, Any]:
    return run_on_ranks(runs, 2)[0]


@pytest.mark.quick
@pytest.mark.parametrize("form", ["WithModel", "AroundSuper", "WithoutModel"])
def test_a_forward_step_with_and_without_the_model_trains_the_same(found: dict[str, Any], form: str) -> None:
    assert found[form] == found["LlamaModel"]


@pytest.mark.parametrize("form", ["OwnReduction", "ReductionMethod"])
def test_a_reduction_of_the_users_is_used_in_either_form(found: dict[str, Any], form: str) -> None:
    assert found[form] == [2 * loss for loss in found["LlamaModel"]]


def test_a_mask_that_the_model_returns_decides(found: dict[str, Any]) -> None:
    assert found["mask of the model"]["losses"][0] == pytest.approx(found["kept by the model"], rel=1e-5)
    assert found["mask of the model"]["losses"][0] != found["LlamaModel"][0]


def test_a_mask_that_the_model_returns_is_counted_over_shares_of_a_sequence(found: dict[str, Any]) -> None:
    whole, shares = found["mask of the model"], found["over shares of sequences"]
    assert shares["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-5)
    # Replicas weigh micro-batches alike that keep more or fewer tokens, and here one replica holds all of them.
    assert len(shares["losses"]) == len(whole["losses"]) == 2


def test_megatron_parallel_called_gives_plain_pytorchs_loss_in_every_way(found: dict[str, Any]) -> None:
    got = found["called"]
    for way in ("validation_step", "forward", "iterator", "forward step", "unwrapped", "with gradients"):
        assert got[way] == pytest.approx(got["plain"], rel=1e-5), way
    assert got["data step"] == pytest.approx(got["plain first"], rel=1e-5)
    assert got["reduction"] == pytest.approx(2 * got["plain"], rel=1e-5)
    assert got["seen"] == [2, 2] and got["gradients"] > 0


def shares() -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    from megatron.core.utils import get_batch_on_this_cp_rank

    from nemo2.mcore.parallel.groups import initialize_model_parallel
    from nemo2.mcore.parallel.layout import Layout

    initialize_model_parallel(Layout(cp=2))
    batch = {key: value for key, value in small_runs.global_batch(0).items() if key != "index"}
    # Megatron-Core 0.17 added a required flag for its hybrid context parallelism, which plain batches never use.
    hybrid = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    theirs = get_batch_on_this_cp_rank(dict(batch), **({"is_hybrid_cp": False} if hybrid else {}))
    ours = llm.get_batch_on_this_context_parallel_rank(batch | {"name": "kept"})
    assert ours.pop("name") == "kept"
    kept = float(ours.pop("num_valid_tokens_in_ub"))
    return ours, theirs, kept - float(batch["loss_mask"].sum())


def test_a_share_of_the_sequence_is_megatron_cores_and_knows_the_whole_count(run_on_ranks: Any) -> None:
    for ours, theirs, difference in run_on_ranks(shares, 2):
        assert ours.keys() == theirs.keys() and difference == 0
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_packed_sequences_begin_and_end_where_cu_seqlens_says() -> None:
    params = llm.get_packed_seq_params({"cu_seqlens": torch.tensor([[0, 6, 16, -1]]), "tokens": torch.zeros(1, 16)})
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 6, 16]
    assert (params.max_seqlen_q, params.qkv_format) == (10, "thd")


def test_the_model_comes_first_where_it_is_asked_for() -> None:
    class Plain(torch.nn.Module):
        pass

    module = Plain()
    assert with_model(lambda model, batch: (model, batch), module)(1) == (module, 1)

    def forward_step(batch: Any, batch_idx: int = 0) -> Any:
        return batch

    assert with_model(forward_step, module)(1) == 1


class ThirdForm(llm.LlamaModel):
    """The form of NeMo's documents that returns what the model has."""

    def validation_loss_reduction(self, model: Any) -> MegatronLossReduction:  # pyright: ignore
        return model.validation_loss_reduction()

    def training_loss_reduction(self, model: Any) -> MegatronLossReduction:  # pyright: ignore
        return model.training_loss_reduction()


def test_a_reduction_that_asks_the_model_gets_the_one_that_it_overrides() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
    model = ThirdForm(llm.LlamaConfig(**sizes, calculate_per_token_loss=True))
    for _ in range(2):
        for stage in ("training", "validation", "test"):
            found = reduction_of(model, stage)
            assert type(found) is llm.MaskedTokenLossReduction and found.per_token
    assert not {"validation_loss_reduction", "training_loss_reduction"} & set(model.__dict__)
