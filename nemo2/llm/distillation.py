# SPDX-License-Identifier: Apache-2.0
"""``llm.distill``: a student is trained on the distributions of a teacher in place of the text's own next tokens.

The teacher has other sizes and the student's layout: it is built on the same process groups. Before each step of the student's
schedule, it reads all of the step's micro-batches, one pipeline stage after the other, and its logits stay on the last stage,
split over the vocabulary as the student's are.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor

from nemo2.checkpoint.auto_resume import AutoResume, RestoreConfig
from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.foreign_files import read_yaml
from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.llm.api import train
from nemo2.llm.inference import find_checkpoint, model_of
from nemo2.models.decoding import core_of
from nemo2.names import did_you_mean
from nemo2.optim.base import OptimizerModule
from nemo2.parallel.distillation import TeacherLogits, cross_entropy, distillation_loss
from nemo2.parallel.megatron_parallel import MegatronParallel, MegatronStep
from nemo2.run_dir.logger import NeMoLogger

_log = logging.getLogger(__name__)


@configurable
@dataclass(frozen=True)
class DistillationConfig:
    """What the student learns from.

    Raises:
        ConfigError: a value is out of its range.
    """

    logit_kl_temperature: float = 1.0
    """Divides both models' logits; above 1 the unlikely tokens count for more."""
    logit_kl_topk: Optional[int] = None
    """The teacher's likeliest tokens that are kept of each distribution, which saves memory. None: all."""
    skip_lm_loss: bool = True
    """Learn from the teacher alone. False adds the cross-entropy of the text."""
    kd_loss_scale: float = 1.0
    """Weighs the teacher's part where the text's is there too."""

    def __post_init__(self) -> None:
        for name, rule, holds in (
            ("logit_kl_temperature", "above 0", self.logit_kl_temperature > 0),
            ("logit_kl_topk", "at least 1, or None", self.logit_kl_topk is None or self.logit_kl_topk >= 1),
            ("kd_loss_scale", "above 0", self.kd_loss_scale > 0),
        ):
            if not holds:
                raise ConfigError(f"DistillationConfig.{name}={getattr(self, name)} must be {rule}.")

    @classmethod
    def from_file(cls, file: Path) -> "DistillationConfig":
        """From YAML with these names.

        Raises:
            ConfigError: another name, or a value out of its range.
        """
        said = read_yaml(file) or {}
        known = [field.name for field in fields(cls)]
        for name in said:
            if name not in known:
                raise ConfigError(f"{file} has no setting {name!r}{did_you_mean(name, known)}")
        return cls(**said)


@configurable(strategy="trainer.strategy")
def distill(
    student_model_path: str,
    teacher_model_path: str,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    distillation_config_path: Optional[str] = None,
    log: Optional[NeMoLogger] = None,
    resume: Optional[AutoResume] = None,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Optional[Any] = None,
    model_transform: Optional[Any] = None,
    distillation_config: Optional[DistillationConfig] = None,
) -> Path:
    """Train a student on a teacher's distributions. Parameters up to ``model_transform`` are NeMo 2.0's, in its order.

    Args:
        student_model_path: The checkpoint that the student begins as, such as `prune` writes, or a run's directory.
        teacher_model_path: The teacher's. It has the student's vocabulary and its layout; sizes may differ.
        trainer: With a `MegatronStrategy` without virtual stages.
        distillation_config_path: A YAML file with the settings of `DistillationConfig`. None: ``distillation_config``.
        resume: Where the run resumes from, if it was interrupted. None: nowhere; either way its first weights are the student's.
        optim: None: the student's own.
        distillation_config: None: its defaults.

    The others are those of `nemo2.llm.train`. The training loss that is reported is the one that is learned from; validation
    reports the text's.

    Returns:
        The run's directory. Its checkpoints are of the student alone.

    Raises:
        CheckpointError: no checkpoint, or none that describes its model.
        ConfigError: two of the configurations, another vocabulary, or sizes that the layout doesn't divide.
    """
    if distillation_config_path is not None and distillation_config is not None:
        raise ConfigError("distillation_config_path and distillation_config say the same: give one of them.")
    settings = distillation_config or DistillationConfig()
    if distillation_config_path is not None:
        settings = DistillationConfig.from_file(Path(distillation_config_path))
    start, place = find_checkpoint(Path(student_model_path)), find_checkpoint(Path(teacher_model_path))
    student, teacher = model_of(start), model_of(place)
    if optim is not None:
        optim.connect(student)
    _refuse_another_vocabulary(student, teacher)
    _refuse_what_has_no_layout(trainer.strategy, teacher, place)
    resume = resume or AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    if resume.restore_config is not None:
        raise ConfigError("resume.restore_config: the student begins as student_model_path. Leave it out.")
    resume.restore_config = RestoreConfig(path=str(start))
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    callbacks.append(_Teaching(teacher, place, settings))
    return train(
        model=student,
        data=data,
        trainer=trainer,
        log=log,
        resume=resume,
        optim=optim,
        tokenizer=tokenizer,
        model_transform=model_transform,
    )


class _Teaching(pl.Callback):
    """Gives each micro-batch of a training step its teacher's logits, and the step the loss that uses them."""

    def __init__(self, teacher: Any, checkpoint: Path, settings: DistillationConfig) -> None:
        self.teacher = teacher
        self.checkpoint = checkpoint
        self.settings = settings
        self.core: Any = None
        self._taught: deque[Optional[TeacherLogits]] = deque()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.core = _loaded_teacher(self.teacher, self.checkpoint, trainer, pl_module)

    def on_megatron_step_start(self, step: MegatronStep) -> Optional[MegatronStep]:
        if step.stage != "training":
            return None
        data_step: Any = step.pl_module.data_step
        with torch.no_grad():
            self._taught = deque(self._asked(data_step(iter([microbatch])), step) for microbatch in step.microbatches())
        return replace(step, forward_step_func=self._taught_step(step.forward_step_func))

    def on_megatron_microbatch_start(self, step: MegatronStep, batch: dict[str, Any]) -> None:
        if step.stage == "training":
            batch["text"] = batch.pop("labels")
            batch["labels"] = None  # without them the student's last stage gives its logits

    def _asked(self, batch: dict[str, Any], step: MegatronStep) -> Optional[TeacherLogits]:
        logits = _through_stages(self.core, batch, step)
        return None if logits is None else TeacherLogits.of(logits, self.settings.logit_kl_topk)

    def _taught_step(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Callable[..., Any]]:
            output, reduce = own(iterator, chunk)
            teacher = self._taught.popleft()
            [batch] = reduce.args
            return output, lambda logits: reduce(self._loss(logits, teacher, batch["text"]))

        return forward_step

    def _loss(self, logits: Tensor, teacher: Optional[TeacherLogits], text: Tensor) -> Tensor:
        """Of each token ``[batch, sequence]``."""
        assert teacher is not None, "the last stage has the teacher's logits"
        taught = distillation_loss(logits, teacher, temperature=self.settings.logit_kl_temperature)
        if self.settings.skip_lm_loss:
            return taught
        return cross_entropy(logits, text) + self.settings.kd_loss_scale * taught


def _through_stages(core: Any, batch: dict[str, Any], step: MegatronStep) -> Optional[Tensor]:
    """The teacher's logits ``[batch, sequence, vocabulary / tp]`` of a micro-batch on the last stage, None on the others.

    A stage begins with the next micro-batch while the following ones are at this one: the pipeline fills."""
    config, group = core.config, parallel_state.get_pipeline_model_parallel_group()
    dtype = config.pipeline_dtype or config.params_dtype
    if not parallel_state.is_pipeline_first_stage():
        share = step.seq_length // config.context_parallel_size
        share //= config.tensor_model_parallel_size if config.sequence_parallel else 1
        device = next(core.parameters()).device
        hidden = torch.empty(share, step.micro_batch_size, config.hidden_size, dtype=dtype, device=device)
        torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)  # pyright: ignore
        core.set_input_tensor(hidden)
    packing = {"packed_seq_params": batch["packed_seq_params"]} if batch.get("packed_seq_params") is not None else {}
    found = core(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=None,
        **packing,
    )
    if parallel_state.is_pipeline_last_stage():
        return found
    following = parallel_state.get_pipeline_model_parallel_next_rank()
    torch.distributed.send(found.to(dtype).contiguous(), following, group=group)  # pyright: ignore
    return None


def _loaded_teacher(teacher: Any, checkpoint: Path, trainer: pl.Trainer, student: Any) -> Any:
    """This rank's stage of the teacher, in the layout and the precision of the student, without gradients."""
    for field in fields(ModelParallelConfig):
        if not callable(value := getattr(student.config, field.name, None)):
            setattr(teacher.config, field.name, value)
    teacher.config.gradient_accumulation_fusion = False
    teacher.config.deallocate_pipeline_outputs = False
    strategy: Any = trainer.strategy
    teacher.configure_model()
    parallel = MegatronParallel(teacher, precision_plugin=strategy.precision_plugin, device=strategy.root_device)
    io = strategy.checkpoint_io
    wanted = {"model": parallel.sharded_state_dict(io.load_content_metadata(checkpoint))}
    parallel.load_chunks_state_dict(io.load_checkpoint(checkpoint, sharded_state_dict=wanted)["model"])
    parallel.eval().requires_grad_(False)
    _log.info("The teacher of %s is loaded.", checkpoint)
    return core_of(teacher)


def _refuse_another_vocabulary(student: Any, teacher: Any) -> None:
    told = []
    for model in (student, teacher):
        rows = model.config.vocab_size or f"padded to a multiple of {model.config.make_vocab_size_divisible_by}"
        told.append((getattr(model.tokenizer, "unique_identifiers", None), rows, f"{model.tokenizer!r}, {rows}"))
    if told[0][:2] != told[1][:2]:
        raise ConfigError(
            f"The teacher's distributions are over another vocabulary ({told[1][2]}) than the student's ({told[0][2]}): "
            "both models need one tokenizer and as many rows."
        )


def _refuse_what_has_no_layout(strategy: Any, teacher: Any, checkpoint: Path) -> None:
    """
    Raises:
        ConfigError: the teacher can't be built in the student's layout, or isn't a whole model.
    """
    manifest = read_manifest(checkpoint)
    if manifest is not None and manifest.part_of is not None:
        raise ConfigError(
            f"{checkpoint} holds additions only: merge them first, nemo2 merge {checkpoint} --output FOLDER."
        )
    sizes = getattr(strategy, "layout", None)
    if sizes is None:
        raise ConfigError(f"distill needs a MegatronStrategy, and trainer.strategy is a {type(strategy).__name__}.")
    if (sizes.vp or 1) > 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={sizes.vp}: a teacher has one stage per rank. Leave it unset for distill."
        )
    config = teacher.config
    for name, what, parts in (
        ("tensor_model_parallel_size", "num_attention_heads", sizes.tp),
        ("pipeline_model_parallel_size", "num_layers", sizes.pp),
        ("expert_model_parallel_size", "num_moe_experts", sizes.ep),
    ):
        value = getattr(config, what, None)
        if value and parts and value % parts:
            raise ConfigError(
                f"{name}={parts} doesn't divide the teacher's {what}={value}: teacher and student are laid out alike, so "
                f"that it has to divide both."
            )
