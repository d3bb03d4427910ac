# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: resumed bit by bit, over other numbers of ranks, and by other strategies."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from support import sharded_runs, small_runs
from support.nightly import each_case, requested

KINDS = ["FSDP2Strategy", "FSDPStrategy", "Megatron-FSDP"]
WEIGHTS = {"ckpt_load_optimizer": False}
TENSORS_CUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STOP = 2
DAILY = [(kind, "frozen for some steps") for kind in KINDS]
DAILY += [(kind, "overflowing") for kind in KINDS[:2]] + [(KINDS[2], "biased experts"), (KINDS[2], "adapters")]
DAILY += [("MegatronStrategy", "experts with dropout")]
INTERRUPTED = [*DAILY, *((kind, "frozen") for kind in KINDS)]
"""A layer without updates, for some steps or all; steps whose gradients are infinite under the loss scale; a buffer, and a part
of a model, in 16 bits, whose weights the strategy would start from otherwise; random streams of the ranks' own."""
BIASED_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.05,
    "moe_aux_loss_coeff": 0.0,
}


def _caught(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Spoil(pl.Callback):
    """One number of what rank 1 has of the parameters is none after the second step; or of its gradients, in the second step."""

    def __init__(self, *, gradients: bool = False) -> None:
        self.gradients = gradients

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.gradients and trainer.global_step == 1 and trainer.global_rank == 1:
            next(trainer.model.parameters()).grad.to_local().view(-1)[:1].fill_(float("nan"))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.gradients or trainer.global_step != 2:
            return
        # Every rank has to ask. What FSDPStrategy gives are copies, what Megatron-FSDP has as parameters are.
        shards = [shard.tensor for shard in trainer.strategy.form.shards(optimizer=False)]
        parameters = (getattr(value, "_local_tensor", value).detach() for value in trainer.model.parameters())
        if trainer.global_rank == 1:
            for tensor in (shards[0], next(value for value in parameters if value.numel())):
                tensor.view(-1)[:1].fill_(float("nan"))


def on_what_is_no_number(directory: str) -> dict[str, Any]:
    from nemo2.callbacks import LossGuard
    from nemo2.checkpoint.directory import finished

    def fit(kind: str, *callbacks: Any) -> Any:
        small_runs.release()
        model = small_runs.build_llama(distributed=True)
        strategy = sharded_runs.strategies()[kind]()
        return small_runs.fit(model, max_steps=3, callbacks=callbacks, strategy=strategy)

    found: dict[str, Any] = {}
    for kind in KINDS:
        place = f"{directory}/{kind}"
        keep = small_runs.keep(place, every_n_train_steps=1, save_top_k=-1)
        found[kind] = _caught(lambda kind=kind, keep=keep: fit(kind, Spoil(), keep))
        found[f"{kind}, left"] = [manifest.step for _, manifest in finished(Path(place))]
    guard = LossGuard(on_nonfinite="skip")
    found["losses"] = fit("FSDP2Strategy", Spoil(gradients=True), guard)["losses"]
    found["skipped"] = guard.skipped
    return found


def on_two_ranks(directory: str, exchanging: list[str]) -> dict[str, Any]:
    train = sharded_runs.train
    runs: dict[str, Any] = {}
    for kind in KINDS:
        place = f"{directory}/{kind}"
        runs[f"{kind}, uninterrupted"] = train(kind, save=place, save_every=STOP)
        runs[f"{kind}, resumed"] = train(kind, ckpt_path=f"{place}/step={STOP}")
    runs["MegatronStrategy"] = train("MegatronStrategy", steps=STOP + 1, strategy=TENSORS_CUT)
    train("MegatronStrategy", steps=STOP, save=f"{directory}/megatron", strategy=TENSORS_CUT)
    for kind in exchanging:
        runs[f"{kind}, weights into MegatronStrategy"] = train(
            "MegatronStrategy",
            steps=STOP + 1,
            ckpt_path=f"{directory}/{kind}/step={STOP}",
            strategy=WEIGHTS | TENSORS_CUT,
        )
        runs[f"{kind}, weights of MegatronStrategy"] = train(
            kind, steps=STOP + 1, ckpt_path=f"{directory}/megatron/step={STOP}", strategy=WEIGHTS
        )
    # State that only its own layout can read: the distributed optimizer's buffers as they are.
    own = {"ckpt_parallel_save_optim": False}
    train("MegatronStrategy", steps=STOP, save=f"{directory}/own", strategy=own)
    for into, layout in (("FSDP2Strategy", {}), ("MegatronStrategy", TENSORS_CUT)):
        runs[f"own state into {into}"] = _caught(
            lambda into=into, layout=layout: train(into, ckpt_path=f"{directory}/own/step={STOP}", strategy=layout)
        )
    runs["another model"] = _caught(
        lambda: train("FSDP2Strategy", ckpt_path=f"{directory}/FSDP2Strategy/step={STOP}", vocab_size=96)
    )
    return runs


def interrupted(directory: str, cases: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """The losses after the save, of a run and of one that is resumed from there."""
    import nemo2 as nl
    from nemo2.callbacks import LayerFreezer
    from nemo2.models.peft import LoRA

    def losses(kind: str, case: str, *callbacks: Any, restore_config: Any = None, **options: Any) -> list[float]:
        small_runs.release()
        frozen = {"frozen for some steps": {"decoder.layers.0": STOP + 1}, "frozen": ["decoder.layers.0"]}
        freezing = [LayerFreezer(frozen[case])] if case in frozen else []
        scaled = nl.MegatronMixedPrecision("16-mixed", fp16_initial_loss_scale=2.0**24, fp16_hysteresis=2)
        precision = {"overflowing": scaled, "biased experts": "bf16-mixed", "adapters": "bf16-mixed"}.get(case, "32")
        model = small_runs.build_llama(distributed=True, **(BIASED_EXPERTS if "experts" in case else {}))
        dropping = {"adapters": 0.0, "experts with dropout": 0.5}
        if case in dropping:
            model.model_transform = LoRA(dim=4, lora_B_init_method="normal", dropout=dropping[case])
        sizes = {"expert_model_parallel_size": 2} if kind == "MegatronStrategy" else {}
        strategy = sharded_runs.strategies()[kind](restore_config=restore_config, **sizes)
        steps = 2 * STOP + (case == "frozen for some steps")  # one more, for what is updated late
        run = {"max_steps": steps, "callbacks": [*freezing, *callbacks], "precision": precision} | options
        return small_runs.fit(model, strategy=strategy, **run)["losses"]

    found = {}
    for kind, case in cases:
        place, base = f"{directory}/{kind} {case}", None
        keep = small_runs.keep(place, every_n_train_steps=STOP, save_top_k=-1)
        if case == "adapters":
            losses(kind, "base", small_runs.keep(f"{place} base"), max_steps=1)
            base = nl.RestoreConfig(path=f"{place} base/step=1")
        whole = losses(kind, case, keep, restore_config=base)
        found[kind, case] = whole[STOP:], losses(kind, case, ckpt_path=f"{place}/step={STOP}", restore_config=base)
    return found


@pytest.mark.parametrize(("kind", "case"), each_case(INTERRUPTED, DAILY))
def test_what_is_kept_beside_updated_parameters_is_resumed_bit_by_bit(goes_on, kind, case):
    whole, resumed = goes_on[kind, case]
    assert resumed == whole and len(set(whole)) > 1


@pytest.fixture(scope="module")
def goes_on(request, run_on_ranks, tmp_path_factory) -> dict[Any, Any]:
    cases = requested(request, "kind", "case")
    return run_on_ranks(interrupted, 2, str(tmp_path_factory.mktemp("interrupted")), cases, timeout=280)[0]


def on_one_rank(directory: str) -> dict[str, Any]:
    return {kind: sharded_runs.train(kind, ckpt_path=f"{directory}/{kind}/step={STOP}") for kind in KINDS[:2]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def runs(request, run_on_ranks, directory) -> dict[str, Any]:
    return run_on_ranks(on_two_ranks, 2, directory, requested(request, "exchanging"), timeout=280)[0]


@pytest.fixture(scope="module")
def alone(run_on_ranks, runs, directory) -> dict[str, Any]:
    return run_on_ranks(on_one_rank, 1, directory, timeout=280)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(kind, runs):
    whole, resumed = runs[f"{kind}, uninterrupted"], runs[f"{kind}, resumed"]
    assert resumed["losses"] == whole["losses"][STOP:]
    assert resumed["norms"] == whole["norms"][STOP:]
    assert resumed["val_losses"] == whole["val_losses"]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_another_number_of_ranks_goes_on_with_it(kind, runs, alone):
    whole = runs[f"{kind}, uninterrupted"]
    assert alone[kind]["losses"] == pytest.approx(whole["losses"][STOP:], rel=1e-5)
    assert alone[kind]["norms"] == pytest.approx(whole["norms"][STOP:], rel=1e-4)


@pytest.mark.parametrize("exchanging", each_case(KINDS, KINDS[:1]))
def test_weights_go_from_one_strategy_to_the_others(exchanging, runs):
    kind = exchanging
    into, after = runs[f"{kind}, weights into MegatronStrategy"], runs[f"{kind}, uninterrupted"]
    assert into["losses"][0] == pytest.approx(after["losses"][STOP], rel=1e-5)
    assert into["norms"][0] == pytest.approx(after["norms"][STOP], rel=1e-4)
    out_of, after = runs[f"{kind}, weights of MegatronStrategy"], runs["MegatronStrategy"]
    assert out_of["losses"][0] == pytest.approx(after["losses"][STOP], rel=1e-5)
    assert out_of["norms"][0] == pytest.approx(after["norms"][STOP], rel=1e-4)


@pytest.mark.parametrize("into", ["FSDP2Strategy", "MegatronStrategy"])
def test_optimizer_state_for_one_layout_only_is_refused_with_the_way_out(into, runs):
    message = runs[f"own state into {into}"]
    assert (
        message.startswith("CheckpointError")
        and "ckpt_parallel_save_optim=False, which only its own layout can load" in message
    )
    assert "strategy.ckpt_load_optimizer=False" in message


def test_a_checkpoint_of_another_model_names_what_differs(runs):
    assert "has shape (64, 32) in the checkpoint and (96, 32) in this model" in runs["another model"]


def test_parameters_that_are_not_finite_are_never_saved_and_such_steps_can_be_left_out(run_on_ranks, tmp_path):
    for found in run_on_ranks(on_what_is_no_number, 2, str(tmp_path), timeout=280):
        for kind in KINDS:
            assert "some parameters aren't finite, so step=2 is not saved" in found[kind]
            assert found[f"{kind}, left"] == [1]
        assert found["skipped"] == [2]
        assert len(found["losses"]) == 3 and all(loss == loss for loss in found["losses"])
