# SPDX-License-Identifier: Apache-2.0
"""A user's own LightningModule under MegatronStrategy: an MLP classifier against a plain PyTorch loop on whole batches."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nemo2.mcore.parallel.loss import MegatronLossReduction
from support import small_runs

STEPS, BATCH, FEATURES, CLASSES = 4, 8, 6, 3
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def layers() -> nn.Sequential:
    generator = torch.Generator().manual_seed(7)
    made = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return made


def examples(batches: int = STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(batches * BATCH, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (batches * BATCH,), generator=generator))


class Classifier(pl.LightningModule):
    """As in Lightning's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs).float(), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        logits = self.net(inputs).float()
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs).float(), labels)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)


class LateClassifier(Classifier):
    """Its layers are made in `configure_model`, under the name `module`."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "module"):
            self.module = layers()

    @property
    def net(self) -> nn.Module:
        return self.module


class Whole(LateClassifier):
    def configure_model(self) -> None:
        super().configure_model()
        self.head = nn.Linear(2, 2)


def loader() -> DataLoader:
    """A plain loader: Lightning shuffles it and deals the examples out, one by one, to the replicas."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return DataLoader(examples(), batch_size=BATCH // world)


class Examples(pl.LightningDataModule):
    """In order, in micro-batches, and with a position that a checkpoint keeps."""

    def __init__(self) -> None:
        from nemo2.data.sampler import MegatronDataSampler

        super().__init__()
        self.data_sampler = MegatronDataSampler(seq_len=1, micro_batch_size=BATCH // 4, global_batch_size=BATCH)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(examples())


def reference(*, steps: int = STEPS, no_decay_on_vectors: bool = False, clip: float = 0.0) -> dict[str, Tensor]:
    net, data = layers(), examples()
    order = list(DistributedSampler(data, 1, 0, shuffle=True))
    vectors = [parameter for parameter in net.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors, **({"weight_decay": 0.0} if no_decay_on_vectors else {})}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    for step in range(steps):
        inputs, labels = data[order[step * BATCH : (step + 1) * BATCH]]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return dict(net.named_parameters())


def train(kind: str, *, precision: Any = None, megatron: bool = False, **options: Any) -> dict[str, Any]:
    """Parameters at the end by their names in `layers()`, and the metrics logged."""
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.mcore.optim.megatron import MegatronOptimizerModule

    small_runs.quiet()
    model: Any = {"own attributes": Classifier, "self.module": LateClassifier, "whole": Whole}[kind]()
    if megatron:
        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.5,
            use_distributed_optimizer=True,
        )  # fmt: skip
        MegatronOptimizerModule(config).connect(model)
    trainer = small_runs.build_trainer(max_steps=options.pop("max_steps", STEPS), precision=precision, **options)
    trainer.fit(model, loader())
    named = {
        name.rpartition("module.")[2].removeprefix("net."): parameter.detach().float().clone()
        for name, parameter in model.named_parameters()
    }
    return {"parameters": named, "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}


def variants() -> dict[str, dict[str, Any]]:
    from nemo2.mcore.precision import MegatronMixedPrecision

    made = {}
    for kind in ("own attributes", "self.module"):
        made[kind] = train(kind)
        made[f"{kind}, Megatron's optimizer"] = train(kind, megatron=True)
        made[f"{kind}, bf16"] = train(kind, megatron=True, precision=MegatronMixedPrecision("bf16-mixed"))
        small_runs.release()
    return made


@pytest.fixture(scope="module")
def trained(run_on_ranks) -> dict[str, dict[str, Any]]:
    ranks = run_on_ranks(variants, 2)
    for name, variant in ranks[0].items():
        for parameter, value in variant["parameters"].items():
            assert torch.equal(value, ranks[1][name]["parameters"][parameter]), "replicas stay equal"
    return ranks[0]


@pytest.mark.parametrize("kind", ["own attributes", "self.module"])
@pytest.mark.parametrize("suffix", ["", ", Megatron's optimizer", ", bf16"])
def test_two_replicas_train_as_one_loop_on_whole_batches(trained, kind, suffix):
    expected = reference() if not suffix else reference(no_decay_on_vectors=True, clip=0.5)
    actual = trained[kind + suffix]["parameters"]
    assert actual.keys() == expected.keys()
    start = dict(layers().named_parameters())
    for name, value in expected.items():
        moved = float((value - start[name]).detach().abs().max())
        tolerance = 1e-6 if "bf16" not in suffix else 0.3 * moved
        assert moved > 1e-2
        torch.testing.assert_close(actual[name], value.detach(), rtol=0, atol=tolerance)


def test_what_the_module_logs_and_what_the_strategy_logs_stand_side_by_side(trained):
    metrics = trained["own attributes"]["metrics"]
    assert {"train_loss", "reduced_train_loss", "lr"} <= metrics.keys()
    assert metrics["lr"] == pytest.approx(1e-2)


def evaluations() -> dict[str, Any]:
    small_runs.quiet()
    model = Classifier()
    trainer = small_runs.build_trainer(
        max_steps=1, precision=None, trainer={"limit_val_batches": 2, "val_check_interval": 1}
    )
    trainer.fit(model, loader(), loader())
    validated = {name: float(value) for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(model, loader(), verbose=False)[0]
    predicted = trainer.predict(model, loader(), return_predictions=True)
    with torch.no_grad():
        inputs, labels = examples()[: 2 * BATCH]
        expected = float(nn.functional.cross_entropy(model.net(inputs), labels))
        inputs, labels = examples()[:]
        logits = model.net(inputs)
        whole = float(nn.functional.cross_entropy(logits, labels))
    return {
        "validated": validated["val_loss"], "expected": expected, "accuracy": validated["val_accuracy"],
        "tested": tested["test_loss"], "whole": whole,
        "predicted": torch.cat(predicted).tolist(), "classes": logits.argmax(-1).tolist(),
    }  # fmt: skip


@pytest.mark.quick
def test_validation_testing_and_prediction_give_what_the_module_computes(run_on_ranks):
    found = run_on_ranks(evaluations, 1)[0]
    assert found["validated"] == pytest.approx(found["expected"], rel=1e-6)
    assert 0 <= found["accuracy"] <= 1
    assert found["tested"] == pytest.approx(found["whole"], rel=1e-6)
    assert found["predicted"] == found["classes"]


def resumed(directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Four steps in one go, and two steps, a checkpoint and two more, with torch's AdamW."""
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    small_runs.quiet()
    whole, first, second = Classifier(), Classifier(), Classifier()
    small_runs.build_trainer(max_steps=STEPS, precision=None).fit(whole, Examples())
    keep = ModelCheckpoint(dirpath=directory, save_optim_on_train_end=True, filename="{step}", save_last=False)
    small_runs.build_trainer(max_steps=2, precision=None, callbacks=[keep]).fit(first, Examples())
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    small_runs.build_trainer(max_steps=STEPS, precision=None).fit(second, Examples(), ckpt_path=f"{directory}/step=2")
    return dict(whole.named_parameters()), dict(second.named_parameters())


def test_a_torch_optimizer_is_resumed_with_its_state(run_on_ranks, tmp_path):
    whole, second = run_on_ranks(resumed, 1, str(tmp_path))[0]
    for name, value in whole.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=1e-7)


def refusals() -> dict[str, str]:
    from nemo2.base.errors import ConfigError
    from nemo2.mcore.precision import MegatronMixedPrecision

    cases: dict[str, Any] = {
        "outside": lambda: train("whole"),
        "clip": lambda: train("own attributes", trainer={"gradient_clip_val": 1.0}),
        "accumulate": lambda: train("own attributes", trainer={"accumulate_grad_batches": 2}),
        "accumulate later": lambda: train("own attributes", callbacks=[GradientAccumulationScheduler({1: 2})]),
        "average": lambda: train("own attributes", callbacks=[EMAWeightAveraging()]),
        "fp16": lambda: train("own attributes", precision=MegatronMixedPrecision("16-mixed")),
    }
    messages = {}
    for name, case in cases.items():
        with pytest.raises(ConfigError) as caught:
            case()
        messages[name] = str(caught.value)
    return messages


def test_what_would_silently_not_happen_is_refused(run_on_ranks):
    messages = run_on_ranks(refusals, 1)[0]
    assert "head.weight, head.bias" in messages["outside"]
    assert "optim.config.clip_grad=1.0" in messages["clip"]
    assert all("data.global_batch_size" in messages[name] for name in ("accumulate", "accumulate later"))
    assert "EMAWeightAveraging" in messages["average"]
    assert "MegatronOptimizerModule" in messages["fp16"]


class OnlyForward(pl.LightningModule):
    """Without predict_step and forward_step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, batch: Any) -> Tensor:
        return self.net(batch[0]).argmax(-1)


class OwnPrediction(OnlyForward):
    """With a reduction of its own, whose result is no tensor, as in scripts for NeMo."""

    def predict_loss_reduction(self) -> Any:
        class Collected(MegatronLossReduction):
            def forward(self, batch: Any, forward_out: Any) -> Any:
                return torch.zeros(1), {"classes": forward_out}

            def reduce(self, reports: Any) -> Any:
                return {"classes": torch.cat([report["classes"] for report in reports])}

        return Collected()


def predict_by_forward() -> dict[str, Any]:
    small_runs.quiet()
    model, own = OnlyForward(), OwnPrediction()
    predicted = small_runs.build_trainer(max_steps=1).predict(model, loader(), return_predictions=True)
    reduced = small_runs.build_trainer(max_steps=1).predict(own, loader(), return_predictions=True)
    return {
        "predicted": torch.cat(predicted).tolist(),
        "direct": model(examples()[:]).tolist(),
        "reduced": torch.cat([one["classes"] for one in reduced]).tolist(),
        "own": own(examples()[:]).tolist(),
    }


def test_a_module_without_steps_is_called_with_the_batch(run_on_ranks):
    [found] = run_on_ranks(predict_by_forward, 1)
    assert found["predicted"] == found["direct"] and len(found["direct"]) == STEPS * BATCH
    assert found["reduced"] == found["own"], "a module's own predict_loss_reduction may give anything"
