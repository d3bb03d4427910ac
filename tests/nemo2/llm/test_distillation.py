# SPDX-License-Identifier: Apache-2.0
"""Distillation: its loss and gradients beside plain PyTorch's, in every layout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from nemo2.base.errors import ConfigError
from support import small_runs
from support.described_models import described
from support.nightly import each_case

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
    "further": {},
}
STUDENTS = {"further": "further"}
"""The students of settings, where it isn't the plain one."""


def parts(directory: str, name: str, *, max_steps: int, **strategy: Any) -> dict[str, Any]:
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.training.run_dir.logger import NeMoLogger

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
    from nemo2.hugging_face.checkpoint import find_checkpoint
    from nemo2.llm import api

    found = {}
    further = {"mtp_num_layers": 1}
    sizes = {"student": {}, "teacher": TEACHER, "other": {"make_vocab_size_divisible_by": 96}, "further": further}
    for name, config in sizes.items():
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
    student = places[STUDENTS.get(settings, "student")]
    place = llm.distill(student, places["teacher"], **run, distillation_config=config)
    return {"losses": recorder.losses, "grad_norms": recorder.grad_norms, "apart": beside.apart, "place": str(place)}


class Beside(pl.Callback):
    """The gradients of a step, beside those of the same loss in plain PyTorch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.apart: list[tuple[float, float]] = []

    def on_megatron_step_end(self, step: Any, reduced: Any) -> None:
        from nemo2.llm.distillation import DistillationCallback
        from nemo2.models.decoding import core_of

        teacher = next(one.core for one in step.trainer.callbacks if isinstance(one, DistillationCallback))
        student: Any = core_of(step.pl_module)
        losses, sums, counts, text = [], [], [], []
        for batch in step.microbatches():
            inputs = batch["tokens"], batch["position_ids"], None
            with torch.no_grad():
                theirs = teacher(*inputs).double()
            mask = batch["loss_mask"]
            per_token = self.loss(student(*inputs).double(), theirs, batch["labels"])
            sums.append((per_token * mask).sum())
            counts.append(mask.sum())
            losses.append(sums[-1] / counts[-1])
            if student.config.mtp_num_layers:  # whose losses join the backward of a loss of the text that is 0 here
                text.append(0 * student(*inputs, labels=batch["labels"], loss_mask=mask).sum())
        parameters = dict(student.named_parameters())
        gradients = torch.autograd.grad(sum([*losses, *text]) / len(losses), list(parameters.values()))
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


@pytest.mark.parametrize("layout", each_case(LAYOUTS, ("TP 2 with SP", "PP 2")))
def test_every_layout_learns_the_same(run_on_ranks: Any, places: Any, alone: dict[str, Any], layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    for settings in ("warm", "top") if layout.startswith("TP") else ("warm",):
        for found in run_on_ranks(distilled, ranks, *places, settings, **strategy, timeout=180):
            for name in ("losses", "grad_norms"):
                assert found[name] == pytest.approx(alone[settings][name], rel=2e-4), name


def test_what_is_saved_is_the_student_alone(alone: dict[str, Any]) -> None:
    from nemo2.hugging_face.checkpoint import Checkpoint

    config = Checkpoint.open(alone["plain"]["place"]).model().config
    assert (config.num_layers, config.hidden_size) == (2, 32)


def test_what_does_not_fit_is_refused_before_anything_is_built(places: Any) -> None:
    from nemo2 import llm
    from nemo2.hugging_face.checkpoint import Checkpoint
    from nemo2.llm.distillation import DistillationCallback
    from nemo2.training.strategy import MegatronStrategy
    from nemo2.training.trainer import Trainer

    directory, checkpoints = places

    def distill(teacher: str = "teacher", *, config: Any = None, **strategy: Any) -> None:
        trainer = Trainer(strategy=MegatronStrategy(**strategy), devices=1)
        data = llm.MockDataModule()
        llm.distill(checkpoints["student"], checkpoints[teacher], data, trainer, distillation_config_path=config)

    with pytest.raises(ConfigError, match="The teacher has another vocabulary .* than the student"):
        distill("other")
    by_size = Checkpoint.open(checkpoints["student"]).model()
    by_size.tokenizer = SimpleNamespace(vocab_size=by_size.tokenizer.vocab_size)  # as a rehearsal knows it
    DistillationCallback(checkpoints["teacher"]).refuse(by_size, MegatronStrategy())
    with pytest.raises(ConfigError, match="does not divide the teacher's num_layers=4"):
        distill(pipeline_model_parallel_size=3)
    with pytest.raises(ConfigError, match="does not divide the teacher's num_attention_heads=8"):
        distill(tensor_model_parallel_size=3)
    file = Path(directory) / "settings.yaml"
    file.write_text("logit_kl_temperatur: 2\n")
    with pytest.raises(ConfigError, match="DistillationConfig has no setting 'logit_kl_temperatur'; did you mean"):
        distill(config=str(file))
    with pytest.raises(ConfigError, match="logit_kl_topk=0: must be a whole number"):
        llm.DistillationConfig(logit_kl_topk=0)


def test_a_recipes_adapters_are_told_to_have_no_effect(places: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from nemo2 import llm
    from nemo2.llm.distillation import distillation_recipe

    _, checkpoints = places
    for scheme, words in (("lora", "peft=LoRA has no effect"), (None, "")):
        recipe = llm.llama_tiny.finetune_recipe(peft_scheme=scheme)
        student, teacher = (Path(checkpoints[name]) for name in ("student", "teacher"))
        assert distillation_recipe(student, teacher, recipe).peft is None
        error = capsys.readouterr().err
        assert words in error and bool(words) == ("peft" in error)


def test_another_teacher_after_a_resume_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from nemo2.llm.distillation import DistillationCallback

    before, after = (DistillationCallback("runs/teacher") for _ in range(2))
    before._digest = after._digest = "one"
    after.load_state_dict(before.state_dict())
    assert not caplog.records
    after._digest = "two"
    after.load_state_dict(before.state_dict())
    assert "The teacher runs/teacher has other weights than before the resume" in caplog.text


def follows_the_data(directory: str, places: dict[str, str]) -> dict[str, Any]:
    """As NeMo's script calls it: the student named twice, data of another length and without a tokenizer."""
    from nemo2 import llm
    from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
    from nemo2.data.mock import MockDataModule
    from nemo2.hugging_face.checkpoint import Checkpoint

    run = parts(directory, "follows", max_steps=1)
    run["data"] = MockDataModule(seq_length=small_runs.SEQ // 2, micro_batch_size=2, global_batch_size=8, num_workers=0)
    start = AutoResume(restore_config=RestoreConfig(path=places["student"]))
    place = llm.distill(places["student"], places["teacher"], **run, resume=start)
    other = AutoResume(restore_config=RestoreConfig(path=places["other"]))
    try:
        llm.distill(places["student"], places["teacher"], **parts(directory, "no", max_steps=1), resume=other)
    except ConfigError as error:
        refused = str(error)
    run = {**parts(directory, "trained", max_steps=1), "data": run["data"]}
    trained = llm.train(model=places["student"], **run, tokenizer="model", resume=start)  # pyright: ignore[reportArgumentType]
    ids = {**parts(directory, "ids", max_steps=1), "data": small_runs.TokenData()}  # name no vocabulary
    of_ids = llm.distill(places["student"], places["teacher"], **ids)
    lengths = [Checkpoint.open(one).model().config.seq_length for one in (place, trained, of_ids)]
    return {"lengths": lengths, "refused": refused}


def test_a_student_from_its_checkpoint_follows_the_data_and_is_named_once(run_on_ranks: Any, places: Any) -> None:
    [found] = run_on_ranks(follows_the_data, 1, *places, timeout=180)
    assert found["lengths"] == [small_runs.SEQ // 2, small_runs.SEQ // 2, small_runs.SEQ]
    assert "the student already starts from student_model_path" in found["refused"]


# As a recipe


def tree(places: dict[str, str], tmp_path: Path, *arguments: str) -> Any:
    """What `nemo2 distill` would launch, read back from what it writes."""
    from nemo2.cli import main
    from nemo2.cli.sources import recipe_tree

    file = tmp_path / "distil.json"
    command = ["distill", places["student"], "--teacher", places["teacher"], "--recipe", "llama_tiny"]
    options = ["--output", str(file), "--name", "taught", "--dir", str(tmp_path / "runs")]
    data = [f"data.seq_length={small_runs.SEQ}", "data.micro_batch_size=2", "data.global_batch_size=8"]
    assert main([*command, "data=MockDataModule", *data, *options, *arguments]) == 0
    return recipe_tree(str(file))


def test_the_command_makes_a_recipe_whose_student_and_teacher_are_both_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo2.cli import main
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.preflight.checks.find import find

    sizes = {"student": {"seq_length": 2 * small_runs.SEQ}, "teacher": TEACHER}  # both follow the data
    models = {name: str(described(tmp_path / name, ByteTokenizer(), **size)) for name, size in sizes.items()}
    recipe = tree(models, tmp_path, "--top-k", "5", "--temperature", "2")
    [teaching] = [one for one in recipe.trainer.callbacks if "Distillation" in str(one.__fn_or_cls__)]
    assert teaching.teacher_model_path == models["teacher"]
    assert (teaching.distillation_config.logit_kl_topk, teaching.distillation_config.logit_kl_temperature) == (5, 2.0)
    assert recipe.resume.restore_config.path == models["student"]
    assert (recipe.model.config.num_layers, recipe.log.name) == (2, "taught")
    assert find(recipe) == []
    assert find(recipe, local=True, devices=2) == []  # files are read too: the student's has other sizes
    recipe.trainer.devices, recipe.trainer.strategy.tensor_model_parallel_size = 3, 3
    told = [problem.message for problem in find(recipe)]
    assert any(one.startswith("The teacher: ") and "8" in one for one in told), told
    recipe.trainer.devices, recipe.trainer.strategy.tensor_model_parallel_size = 2, 1
    recipe.trainer.strategy.pipeline_model_parallel_size = 2
    recipe.trainer.strategy.virtual_pipeline_model_parallel_size = 1
    teaching.teacher_model_path = str(tmp_path / "none")
    assert any("does not exist" in problem.message for problem in find(recipe))
    capsys.readouterr()
    for arguments, words in (
        ([], "distill needs --teacher"),
        (["--teacher", str(tmp_path / "none")], "none does not exist"),
        (["--teacher", models["teacher"]], "to provide trainer and data"),
        (
            ["--teacher", models["teacher"], "--recipe", "llama_tiny", "--top-k", "0"],
            "logit_kl_topk=0: must be a whole number of at least 1",
        ),
    ):
        assert main(["distill", models["student"], *arguments]) == 2
        assert words in capsys.readouterr().err


class Weighed(pl.Callback):
    """What a teacher really takes on a rank."""

    found: dict[str, int]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        teaching: Any = next(one for one in trainer.callbacks if hasattr(one, "kept_bytes"))  # pyright: ignore
        tensors = [*teaching.core.parameters(), *teaching.core.buffers()]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.found = {"teacher": sum(storages.values()), "kept": teaching.kept_bytes}


def weighed(directory: str, places: dict[str, str], name: str, **strategy: Any) -> dict[str, int]:
    from nemo2 import llm

    run, weigh = parts(directory, name, max_steps=1, **strategy), Weighed()
    run["trainer"].callbacks.append(weigh)
    llm.distill(places["student"], places["teacher"], **run)
    return weigh.found


def rehearsed(places: dict[str, str], **strategy: Any) -> list[dict[str, int]]:
    """The same for each rank of a world that isn't there."""
    from nemo2.hugging_face.checkpoint import Checkpoint
    from nemo2.llm.distillation import DistillationCallback
    from nemo2.preflight.rehearse.kernels import plain_kernels
    from nemo2.preflight.rehearse.rank import run_rank

    small_runs.quiet()
    found = []

    def made() -> tuple[Any, Any, Any]:
        run = parts("unused", "unused", max_steps=1, **strategy)
        run["trainer"].callbacks.append(DistillationCallback(places["teacher"]))
        student = Checkpoint.open(places["student"]).model()
        return student, run["data"], run["trainer"]

    def inspected(ran: Any) -> dict[str, int]:
        from nemo2.preflight.rehearse.stage import memory_of

        teaching = next(one for one in ran.strategy.trainer.callbacks if hasattr(one, "kept_bytes"))
        memory = memory_of(ran)
        assert memory.terms()["teacher"] == memory.teacher and memory.total > memory.teacher
        waiting = teaching.kept_bytes * ran.num_microbatches_of_step
        assert memory.logits >= waiting
        return {"teacher": memory.teacher, "kept": teaching.kept_bytes}

    for rank in range(2):
        found.append(
            run_rank(
                made,
                rank=rank,
                world_size=2,
                as_on_gpu=False,
                patches=plain_kernels(),
                microbatches=2,
                inspect=inspected,
            )
        )
    return found


@pytest.mark.parametrize("layout", each_case(("TP 2 with SP", "PP 2"), ["PP 2"]))
def test_a_rehearsal_counts_the_teacher_to_the_byte(run_on_ranks: Any, places: Any, layout: str) -> None:
    ranks, strategy = LAYOUTS[layout]
    real = run_on_ranks(weighed, ranks, *places, f"weighed-{layout[:2]}", **strategy, timeout=180)
    (dry,) = run_on_ranks(rehearsed, 1, places[1], **strategy, init_process_group=False, timeout=180)
    assert dry == real
    assert all(one["teacher"] > 0 for one in real)
    assert [one["kept"] > 0 for one in real] == [False, layout == "PP 2"]
