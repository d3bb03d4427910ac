# SPDX-License-Identifier: Apache-2.0
"""Losses that Megatron-Core keeps in trackers: forgotten between models, and logged as what they are."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from nemo2.models.ssm import MambaModel, SSMConfig
from support import small_runs

EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01, "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
STEPS, EVERY = 4, 2


def logged(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The metrics of a run that logs every second step, and by hand what the routers decided in it, by layer."""
    lines: list[dict[str, float]] = []
    seen: dict[int, list[tuple[float, float]]] = {}

    class Watch(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            for module in trainer.strategy.megatron_parallel.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self.look)

        def look(self, router: Any, inputs: Any, outputs: Any) -> None:
            if not router.training:
                return
            logits = router.gating(inputs[0].detach()).detach().double().reshape(-1, router.config.num_moe_experts)
            probabilities = logits.softmax(-1)
            chosen = outputs[1].reshape(-1, router.config.num_moe_experts).double()
            experts = chosen.size(1)
            fraction = chosen.sum(0) / chosen.sum()
            balance = experts * (fraction * probabilities.mean(0)).sum()
            z = logits.logsumexp(-1).square().mean()
            seen.setdefault(router.layer_number, []).append((float(balance), float(z)))

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            names = [name for name in trainer.callback_metrics if "loss" in name]
            if trainer.global_step % EVERY == 0:
                lines.append({name: float(trainer.callback_metrics[name]) for name in names})

    model = small_runs.build_llama(**config)
    trainer = {"log_every_n_steps": EVERY} | options.pop("trainer", {})
    record = small_runs.fit(model, max_steps=STEPS, callbacks=[Watch()], trainer=trainer, **options)
    small_runs.release()
    return {"lines": lines, "seen": seen, "losses": record["losses"]}


def train_deeper_and_deeper() -> list[float]:
    hybrid = {"hybrid_override_pattern": "M*-E", "mamba_num_groups": 2, "mamba_head_dim": 8, "mamba_state_dim": 8}
    models = [small_runs.build_llama(num_layers=layers, **EXPERTS) for layers in (2, 3)]
    models.append(MambaModel(SSMConfig(**small_runs.MODEL | EXPERTS | hybrid | {"num_layers": 4})))
    return [loss for model in models for loss in small_runs.fit(model, max_steps=1)["losses"]]


FREQUENCIES: list[Any] = [1, [0, 1]]
# The first layer is dense: with a pipeline the first stage, which logs, has no router.
ROUTED = {**EXPERTS, "moe_z_loss_coeff": 0.001, "moe_layer_freq": [0, 1], "add_bias_linear": False}
FURTHER = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_model_parallel_size": 2},
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "ep": {"expert_model_parallel_size": 2},
}


def in_one_process(folder: str) -> dict[str, Any]:
    """Also leaves checkpoints of one step, for layouts that would draw other weights."""
    found: dict[str, Any] = {"deeper": train_deeper_and_deeper(), "dense": logged({})}
    for freq in FREQUENCIES:
        found[f"freq {freq}"] = logged({**EXPERTS, "moe_z_loss_coeff": 0.001, "moe_layer_freq": freq})
    for name, config in (("routed", ROUTED), ("further", FURTHER)):
        keep = small_runs.keep(f"{folder}/{name}", every_n_train_steps=1, monitor=None)
        small_runs.fit(small_runs.build_llama(**config), max_steps=1, callbacks=[keep])
        found[name] = lines_of(config, f"{folder}/{name}")
    return found


def on_two_ranks(folder: str) -> dict[str, Any]:
    found = {name: lines_of(ROUTED, f"{folder}/routed", **layout) for name, layout in LAYOUTS.items()}
    return found | {"further": lines_of(FURTHER, f"{folder}/further", **LAYOUTS["pp"])}


def lines_of(config: dict[str, Any], folder: str, **layout: Any) -> list[dict[str, float]]:
    return logged(config, ckpt_path=f"{folder}/step=1", **layout)["lines"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tmp_path_factory.mktemp("tracked"))


@pytest.fixture(scope="module")
def one(run_on_ranks: Any, folder: str) -> dict[str, Any]:
    return run_on_ranks(in_one_process, 1, folder)[0]


@pytest.fixture(scope="module")
def two(run_on_ranks: Any, folder: str, one: Any) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, folder)


def test_a_deeper_model_trains_after_a_shallower_one(one: Any) -> None:
    assert len(one["deeper"]) == 3


@pytest.mark.parametrize("freq", FREQUENCIES)
def test_router_losses_are_means_over_the_steps_since_the_last_line(one: Any, freq: Any) -> None:
    found = one[f"freq {freq}"]
    assert len(found["lines"]) == STEPS // EVERY
    count = small_runs.GBS // small_runs.MBS * EVERY
    for index, line in enumerate(found["lines"]):
        window = [layer[index * count : (index + 1) * count] for layer in found["seen"].values()]
        assert len(window) == (2 if freq == 1 else 1)
        flat = torch.tensor(window).flatten(0, 1)
        assert line["load_balancing_loss"] == pytest.approx(float(flat[:, 0].mean()), rel=1e-4)
        assert line["z_loss"] == pytest.approx(float(flat[:, 1].mean()), rel=1e-4)
        assert line["load_balancing_loss"] > 0.9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_logs_what_one_process_does(one: Any, two: Any, layout: str) -> None:
    # Replicas balance their own tokens each: a mean of losses, not the loss of a mean.
    tolerance = 0.05 if layout == "ep" else 1e-4
    for lines in (rank[layout] for rank in two):
        assert len(lines) == len(one["routed"]) == 2
        for alone, line in zip(one["routed"], lines, strict=True):
            for name in ("load_balancing_loss", "z_loss"):
                assert line[name] == pytest.approx(alone[name], rel=tolerance)


def test_losses_of_further_tokens_are_logged_on_every_stage(one: Any, two: Any) -> None:
    alone = one["further"]
    assert 3.0 < alone[0]["mtp_1_loss"] < 5.5  # 64 ids: about log(64)
    assert alone[0]["mtp_1_loss"] != alone[0]["reduced_train_loss"]
    for lines in (rank["further"] for rank in two):
        assert [line["mtp_1_loss"] for line in lines] == pytest.approx([line["mtp_1_loss"] for line in alone], rel=1e-4)


def test_a_dense_model_logs_none(one: Any) -> None:
    assert set(one["dense"]["lines"][0]) == {"reduced_train_loss"}
