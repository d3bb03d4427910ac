# SPDX-License-Identifier: Apache-2.0
"""Losses that Megatron-Core keeps in trackers: forgotten between models, and logged as what they are."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import small_runs

EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01, "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
STEPS, EVERY = 4, 2


def train_deeper_and_deeper() -> list[float]:
    from nemo2.models.ssm import MambaModel, SSMConfig

    hybrid = {"hybrid_override_pattern": "M*-E", "mamba_num_groups": 2, "mamba_head_dim": 8, "mamba_state_dim": 8}
    models = [small_runs.build_llama(num_layers=layers, **EXPERTS) for layers in (2, 3)]
    models.append(MambaModel(SSMConfig(**small_runs.MODEL | EXPERTS | hybrid | {"num_layers": 4})))
    return [loss for model in models for loss in small_runs.fit(model, max_steps=1)["losses"]]


def test_a_deeper_model_trains_after_a_shallower_one(run_on_ranks: Any) -> None:
    assert len(run_on_ranks(train_deeper_and_deeper, 1)[0]) == 3


def logged(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The metrics of a run that logs every second step, and by hand what the routers decided in it, by layer."""
    import lightning.pytorch as pl
    from megatron.core.transformer.moe.router import TopKRouter

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
    return {"lines": lines, "seen": seen, "losses": record["losses"]}


@pytest.mark.parametrize("freq", [1, [0, 1]])
def test_router_losses_are_means_over_the_steps_since_the_last_line(run_on_ranks: Any, freq: Any) -> None:
    config = {**EXPERTS, "moe_z_loss_coeff": 0.001, "moe_layer_freq": freq}
    found = run_on_ranks(logged, 1, config)[0]
    assert len(found["lines"]) == STEPS // EVERY
    count = small_runs.GBS // small_runs.MBS * EVERY
    for index, line in enumerate(found["lines"]):
        window = [layer[index * count : (index + 1) * count] for layer in found["seen"].values()]
        assert len(window) == (2 if freq == 1 else 1)
        flat = torch.tensor(window).flatten(0, 1)
        assert line["load_balancing_loss"] == pytest.approx(float(flat[:, 0].mean()), rel=1e-4)
        assert line["z_loss"] == pytest.approx(float(flat[:, 1].mean()), rel=1e-4)
        assert line["load_balancing_loss"] > 0.9


def begin(config: dict[str, Any], folder: str) -> None:
    """A checkpoint of one step, for layouts that would draw other weights."""
    from nemo2 import ModelCheckpoint

    saves = ModelCheckpoint(
        dirpath=folder, every_n_train_steps=1, save_optim_on_train_end=True, filename="{step}", save_last=False, monitor=None
    )  # fmt: skip
    small_runs.fit(small_runs.build_llama(**config), max_steps=1, callbacks=[saves])


def lines_of(config: dict[str, Any], folder: str, layout: dict[str, Any]) -> list[dict[str, float]]:
    (checkpoint,) = (path for path in Path(folder).iterdir() if path.is_dir())
    return logged(config, ckpt_path=checkpoint, **layout)["lines"]


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"expert_model_parallel_size": 2},
    ],
)
def test_every_rank_logs_what_one_process_does(run_on_ranks: Any, layout: dict[str, Any], tmp_path: Path) -> None:
    # The first layer is dense: with a pipeline the first stage, which logs, has no router.
    config = {**EXPERTS, "moe_z_loss_coeff": 0.001, "moe_layer_freq": [0, 1], "add_bias_linear": False}
    run_on_ranks(begin, 1, config, str(tmp_path))
    (alone,) = run_on_ranks(lines_of, 1, config, str(tmp_path), {})
    for lines in run_on_ranks(lines_of, 2, config, str(tmp_path), layout):
        assert len(lines) == len(alone) == 2
        for one, other in zip(alone, lines, strict=True):
            for name in ("load_balancing_loss", "z_loss"):
                # Replicas balance their own tokens each: a mean of losses, not the loss of a mean.
                tolerance = 0.05 if "expert_model_parallel_size" in layout else 1e-4
                assert other[name] == pytest.approx(one[name], rel=tolerance)


def test_losses_of_further_tokens_are_logged_on_every_stage(run_on_ranks: Any, tmp_path: Path) -> None:
    config = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
    run_on_ranks(begin, 1, config, str(tmp_path))
    (alone,) = run_on_ranks(lines_of, 1, config, str(tmp_path), {})
    assert 3.0 < alone[0]["mtp_1_loss"] < 5.5  # 64 ids: about log(64)
    assert alone[0]["mtp_1_loss"] != alone[0]["reduced_train_loss"]
    for lines in run_on_ranks(lines_of, 2, config, str(tmp_path), {"pipeline_model_parallel_size": 2}):
        assert [line["mtp_1_loss"] for line in lines] == pytest.approx([line["mtp_1_loss"] for line in alone], rel=1e-4)


def test_a_dense_model_logs_none(run_on_ranks: Any) -> None:
    (found,) = run_on_ranks(logged, 1, {})
    assert set(found["lines"][0]) == {"reduced_train_loss"}
