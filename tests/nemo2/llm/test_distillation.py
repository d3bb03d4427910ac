# SPDX-License-Identifier: Apache-2.0
"""Distillation: its loss and gradients beside plain PyTorch's, in every layout."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo2.errors import ConfigError
from support import small_runs

TEACHER = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_query_groups": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP 2 with SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}),
    "DP 2": (2, {}),
    "CP 2": (2, {"context_parallel_size": 2}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"logit_kl_temperature": 2.0, "skip_lm_loss": False, "kd_loss_scale": 0.5},
    "top": {"logit_kl_topk": 5},
}


def parts(directory: str, name: str, *, max_steps: int, **strategy: Any) -> dict[str, Any]:
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.run_dir.logger import NeMoLogger

    small_runs.release()
    small_runs.quiet()
    keep = ModelCheckpoint(filename="{step}", verbose=False)
    return {
        "data": MockDataModule(
            seq_length=small_runs.SEQ, tokenizer=ByteTokenizer(), micro_batch_size=2, global_batch_size=8, num_workers=0
        ),
        "trainer": small_runs.build_trainer(max_steps=max_steps, trainer={"limit_val_batches": 0}, **strategy),
        "log": NeMoLogger(name=name, log_dir=directory, ckpt=keep, use_datetime_version=False),
    }


def save(directory: str) -> dict[str, str]:
    from nemo2.llm import api
    from nemo2.llm.inference import find_checkpoint

    found = {}
    for name, config in {"student": {}, "teacher": TEACHER, "other": {"make_vocab_size_divisible_by": 96}}.items():
        run = parts(directory, name, max_steps=2)
        model = small_runs.build_llama(**{"vocab_size": None, "lr": 0.05} | config)
        model.tokenizer = run["data"].tokenizer
        found[name] = str(find_checkpoint(Path(api.pretrain(model=model, **run))))
    return found


def distilled(directory: str, places: dict[str, str], settings: str, **strategy: Any) -> dict[str, Any]:
    from nemo2 import llm

    run = parts(
        directory, "-".join([settings, str(torch.distributed.get_world_size()), *strategy]), max_steps=3, **strategy
    )
    recorder, beside = small_runs.Recorder(), Beside(SETTINGS[settings])
    run["trainer"].callbacks += [recorder, *([] if strategy or torch.distributed.get_world_size() > 1 else [beside])]
    config = llm.DistillationConfig(**SETTINGS[settings])
    place = llm.distill(places["student"], places["teacher"], **run, distillation_config=config)
    return {"losses": recorder.losses, "apart": beside.apart, "place": str(place)}


class Beside(pl.Callback):
    """The gradients of a step, beside those of the same loss in plain PyTorch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.apart: list[tuple[float, float]] = []

    def on_megatron_step_end(self, step: Any, reduced: Any) -> None:
        from nemo2.llm.distillation import _Teaching
        from nemo2.models.decoding import core_of

        teacher = next(one.core for one in step.trainer.callbacks if isinstance(one, _Teaching))
        student: Any = core_of(step.pl_module)
        losses, sums, counts = [], [], []
        for batch in step.microbatches():
            inputs = batch["tokens"], batch["position_ids"], None
            with torch.no_grad():
                theirs = teacher(*inputs).double()
            mask = batch["loss_mask"]
            per_token = self.loss(student(*inputs).double(), theirs, batch["labels"])
            sums.append((per_token * mask).sum())
            counts.append(mask.sum())
            losses.append(sums[-1] / counts[-1])
        parameters = dict(student.named_parameters())
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(parameters.values()))
        apart = max(
            float((parameter.main_grad - gradient).norm() / gradient.norm())
            for parameter, gradient in zip(parameters.values(), gradients, strict=True)
        )
        self.apart.append((abs(float(reduced) - float(sum(sums) / sum(counts))), apart))

    def loss(self, student: Any, teacher: Any, labels: Any) -> Any:
        t, k = self.settings.get("logit_kl_temperature", 1.0), self.settings.get("logit_kl_topk")
        if k is not None:
            least = teacher.topk(k).values[..., -1:]
            teacher = teacher.masked_fill(teacher < least, float("-inf"))
        q, log_p = (teacher / t).softmax(-1), (student / t).log_softmax(-1)
        kept = q > 0
        taught = torch.where(kept, q * (q.clamp_min(1e-300).log() - torch.where(kept, log_p, 0.0)), 0.0).sum(-1) * t**2
        if self.settings.get("skip_lm_loss", True):
            return taught
        told = torch.nn.functional.cross_entropy(student.transpose(1, 2), labels, reduction="none")
        return told + self.settings["kd_loss_scale"] * taught


@pytest.fixture(scope="module")
def places(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    directory = str(tmp_path_factory.mktemp("distilled"))
    return directory, run_on_ranks(save, 1, directory, timeout=180)[0]


@pytest.fixture(scope="module")
def alone(run_on_ranks: Any, places: Any) -> dict[str, Any]:
    return {name: run_on_ranks(distilled, 1, *places, name, timeout=180)[0] for name in SETTINGS}


@pytest.mark.parametrize("settings", SETTINGS)
def test_losses_and_gradients_are_those_of_plain_pytorch(alone: dict[str, Any], settings: str) -> None:
    found = alone[settings]
    assert len(found["apart"]) == 3
    for loss, gradient in found["apart"]:
        assert loss < 1e-5 and gradient < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(run_on_ranks: Any, places: Any, alone: dict[str, Any], layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    for settings in ("warm", "top") if layout.startswith(("TP", "PP")) else ("warm",):
        for found in run_on_ranks(distilled, ranks, *places, settings, **strategy, timeout=180):
            assert found["losses"] == pytest.approx(alone[settings]["losses"], rel=2e-4)


def test_what_is_saved_is_the_student_alone(alone: dict[str, Any]) -> None:
    from nemo2.llm.inference import find_checkpoint, model_of

    config = model_of(find_checkpoint(Path(alone["plain"]["place"]))).config
    assert (config.num_layers, config.hidden_size) == (2, 32)


def test_what_does_not_fit_is_refused_before_anything_is_built(places: Any) -> None:
    from nemo2 import llm
    from nemo2.strategy import MegatronStrategy
    from nemo2.trainer import Trainer

    directory, checkpoints = places

    def distill(teacher: str = "teacher", *, config: Any = None, **strategy: Any) -> None:
        trainer = Trainer(strategy=MegatronStrategy(**strategy), devices=1)
        llm.distill(checkpoints["student"], checkpoints[teacher], None, trainer, distillation_config_path=config)  # pyright: ignore

    with pytest.raises(ConfigError, match="over another vocabulary .* than the student's"):
        distill("other")
    with pytest.raises(ConfigError, match="doesn't divide the teacher's num_layers=4"):
        distill(pipeline_model_parallel_size=3)
    with pytest.raises(ConfigError, match="doesn't divide the teacher's num_attention_heads=8"):
        distill(tensor_model_parallel_size=3)
    file = Path(directory) / "settings.yaml"
    file.write_text("logit_kl_temperatur: 2\n")
    with pytest.raises(ConfigError, match="no setting 'logit_kl_temperatur'; did you mean 'logit_kl_temperature'"):
        distill(config=str(file))
    with pytest.raises(ConfigError, match="logit_kl_topk=0 must be at least 1"):
        llm.DistillationConfig(logit_kl_topk=0)
