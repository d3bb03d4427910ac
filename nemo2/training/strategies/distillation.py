# SPDX-License-Identifier: Apache-2.0
"""Distillation: a teacher beside the trained model, whose output distributions the student learns in place of the
text's next tokens. Multi-token prediction of the student learns from the text.

The teacher has its own sizes but the student's layout, on the same process groups. In a pipeline the teacher reads all
of a step's micro-batches, one stage after the other, before the student's schedule begins. Its logits stay on the last
stage, sharded over the vocabulary like the student's. Without a pipeline the teacher reads each micro-batch right
before the student.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor

from nemo2.base import ranks
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.base.variables import replaced
from nemo2.checkpoint.context import tokenizer_settings
from nemo2.checkpoint.foreign_files import read_yaml
from nemo2.config.capture import configurable
from nemo2.config.domains import Domain, refuse_out_of_range
from nemo2.config.notices import warn_without_effect
from nemo2.config.value_types import refuse_misfits
from nemo2.config.walk import callbacks_of, class_of
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.mcore.parallel.distillation import TeacherLogits, cross_entropy, distillation_loss
from nemo2.mcore.parallel.megatron_parallel import MegatronParallel, MegatronStep
from nemo2.models.decoding import core_of, through_stage
from nemo2.models.sampling import LEAST_TEMPERATURE

_log = logging.getLogger(__name__)


_DOMAINS = {
    "logit_kl_temperature": Domain(f"[{LEAST_TEMPERATURE}, inf)", "logits are divided by this number"),
    "logit_kl_topk": Domain("[1, inf)", "a number of tokens", "whole", unless="set None to keep all"),
    "kd_loss_scale": Domain("(0, inf)", "multiplies the teacher's loss"),
}


@configurable
@dataclass(frozen=True)
class DistillationConfig:
    """Select what the student learns from.

    Raises:
        ConfigError: a value is out of range.
    """

    logit_kl_temperature: float = 1.0
    """The divisor of both models' logits. Above 1 unlikely tokens count for more."""
    logit_kl_topk: Optional[int] = None
    """The number of the teacher's likeliest tokens to keep of each distribution, which saves memory. None: all."""
    skip_lm_loss: bool = True
    """Learn from the teacher only. False: add the cross-entropy of the text."""
    kd_loss_scale: float = 1.0
    """The weight of the teacher's loss if the text's loss is added."""

    def __post_init__(self) -> None:
        refuse_misfits(type(self), vars(self), of="DistillationConfig")
        refuse_out_of_range(vars(self), "DistillationConfig", _DOMAINS)
        if self.skip_lm_loss:
            why = "The loss is the teacher's alone: set skip_lm_loss=False to add the text's."
            warn_without_effect(why, kd_loss_scale=(self.kd_loss_scale, 1.0))

    @classmethod
    def from_file(cls, file: Path) -> "DistillationConfig":
        """Read the settings from a YAML file with these names.

        Raises:
            ConfigError: an unknown name, or a value out of range.
        """
        settings = read_yaml(file) or {}
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in names:
                raise ConfigError(f"{file}: DistillationConfig has no setting {name!r}{did_you_mean(name, names)}")
        return cls(**settings)


@configurable
class DistillationCallback(pl.Callback):
    """Add the teacher's logits to each micro-batch of a training step, and use the loss that compares them with the
    student's.

    Every rank holds the teacher's parameters beside the student's, and each step includes the teacher's forward. In a
    pipeline the last stage keeps the logits of all of a step's micro-batches. ``logit_kl_topk`` makes them small.

    Args:
        teacher_model_path: The teacher's checkpoint, or a run's directory. The teacher must have the student's
            vocabulary, and uses the student's layout. Its sizes may differ.
        distillation_config: The settings. None: their defaults.

    Raises:
        CheckpointError: at setup, if the checkpoint is missing or doesn't describe its model.
        ConfigError: at setup, if the vocabularies differ or the layout doesn't divide the sizes.
    """

    def __init__(self, teacher_model_path: str, distillation_config: Optional[DistillationConfig] = None) -> None:
        self.teacher_model_path = teacher_model_path
        self.distillation_config = distillation_config
        self.settings = distillation_config or DistillationConfig()
        self.core: Any = None
        """The teacher's stage on this rank."""
        self.kept_bytes = 0
        """The bytes of a micro-batch's logits that wait for the student's schedule."""
        self._teacher_logits: deque[Optional[TeacherLogits]] = deque()
        self._text: Optional[Tensor] = None
        """The text's next tokens in the micro-batch whose logits the student computes."""
        self._digest = ""
        """The digest of the teacher's weights. "": unknown."""

    def refuse(self, student: Any, strategy: Any) -> None:
        """Raise an error if the teacher can't teach ``student`` in the layout of ``strategy``. Builds nothing."""
        checkpoint = Checkpoint.open(self.teacher_model_path).require_nemo2()
        teacher = checkpoint.model()
        vocabularies, shown = [], []
        for model in (student, teacher):
            rows = model.config.vocab_size or f"padded to a multiple of {model.config.make_vocab_size_divisible_by}"
            vocabularies.append(tokenizer_settings(model.tokenizer) | {"rows": rows})
            shown.append(f"{model.tokenizer!r}, {rows}")
        if not all(
            vocabulary["tokenizer_identity"] for vocabulary in vocabularies
        ):  # a rehearsal may know a tokenizer by its size only
            vocabularies = [one | {"tokenizer_identity": {}} for one in vocabularies]
        if vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"The teacher has another vocabulary ({shown[1]}) than the student ({shown[0]}). Use two models with the same "
                "tokenizer and the same number of vocabulary rows."
            )
        checkpoint.refuse_adapters()
        _refuse_layout(strategy, teacher)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.refuse(pl_module, trainer.strategy)
            checkpoint = Checkpoint.open(self.teacher_model_path)
            self.core, self._digest = _teacher(checkpoint, trainer, pl_module), checkpoint.digest

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = state_dict.get("teacher")
        if before and self._digest and before != self._digest and ranks.is_rank_zero():
            _log.warning(
                "The teacher %s has other weights than before the resume. A run's directory stands for its newest checkpoint: to "
                "go on with the same teacher, set teacher_model_path to its checkpoint.",
                self.teacher_model_path,
            )

    def on_megatron_step_start(self, step: MegatronStep) -> Optional[MegatronStep]:
        if step.stage != "training":
            return None
        self._teacher_logits.clear()
        if _in_pipeline():
            data_step: Any = step.pl_module.data_step
            self._teacher_logits = deque(
                self._logits_of_teacher(data_step(iter([microbatch])), step) for microbatch in step.microbatches()
            )
            self.kept_bytes = sum(logits.num_bytes for logits in self._teacher_logits if logits is not None) // len(
                self._teacher_logits
            )
        return replace(step, forward_step_func=self._distilled_step(step))

    def on_megatron_microbatch_start(self, step: MegatronStep, batch: dict[str, Any]) -> None:
        if step.stage == "training":
            batch["text"] = self._text = batch["labels"]
            config: Any = step.pl_module.config
            if not config.mtp_num_layers:  # which learns its further predictions from labels
                batch["labels"] = None  # without labels the student's last stage returns logits
            if not _in_pipeline():
                self._teacher_logits.append(self._logits_of_teacher(batch, step))

    def _logits_of_teacher(self, batch: dict[str, Any], step: MegatronStep) -> Optional[TeacherLogits]:
        with torch.no_grad():
            logits = _through_stages(self.core, batch, step)
            return None if logits is None else TeacherLogits.of(logits, self.settings.logit_kl_topk)

    def _distilled_step(self, step: MegatronStep) -> Callable[..., Any]:
        def forward_step(iterator: Iterator[Any], chunk: Any, **options: Any) -> tuple[Any, Callable[..., Any]]:
            with self._with_logits(core_of(chunk)):
                output, reduce = step.forward_step_func(iterator, chunk, **options)
            [batch] = reduce.args
            teacher = self._teacher_logits.popleft()
            return output, lambda logits: reduce(self._loss(logits, teacher, batch["text"]))

        return forward_step

    @contextmanager
    def _with_logits(self, core: Any) -> Iterator[None]:
        """A context in which a student with multi-token prediction returns logits as one without labels does."""
        if not core.config.mtp_num_layers or not core.post_process:
            yield
            return
        losses = core.compute_language_model_loss

        def logits_or_losses(labels: Tensor, logits: Tensor) -> Tensor:
            return logits.transpose(0, 1).contiguous() if labels is self._text else losses(labels, logits)

        with replaced(core, compute_language_model_loss=logits_or_losses):
            yield

    def _loss(self, logits: Tensor, teacher: Optional[TeacherLogits], text: Tensor) -> Tensor:
        """The loss of each token, ``[batch, sequence]``."""
        assert teacher is not None, "the last stage has the teacher's logits"
        loss = distillation_loss(logits, teacher, temperature=self.settings.logit_kl_temperature)
        if self.settings.skip_lm_loss:
            return loss
        return cross_entropy(logits, text) + self.settings.kd_loss_scale * loss


def _in_pipeline() -> bool:
    """Whether stages wait for each other, so that a teacher's forward in between would change the order of their
    messages."""
    return parallel_state.get_pipeline_model_parallel_world_size() > 1


def teachers_recipe(recipe: Any) -> Optional[Any]:
    """The recipe of a run whose model is the teacher of ``recipe``, in the same layout and on the same data. None:
    there is no teacher.

    It serves to check the teacher's sizes.

    Raises:
        CheckpointError: the teacher's checkpoint is missing or doesn't describe its model.
    """
    teaching = next((one for one in callbacks_of(recipe.trainer) if class_of(one) is DistillationCallback), None)
    if teaching is None:
        return None
    alone = copy.deepcopy(recipe)
    others = [one for one in callbacks_of(alone.trainer) if class_of(one) is not DistillationCallback]
    alone.trainer.callbacks = others
    if hasattr(alone, "resume"):
        alone.resume = None  # what the student starts from, which may have other sizes
    teacher = Checkpoint.open(teaching.teacher_model_path).require_nemo2()
    alone.model = teacher.model_config(follow_data=True)
    if getattr(getattr(alone, "data", None), "tokenizer", None) is None:  # data of token ids, which name no vocabulary
        alone.model.tokenizer = teacher.tokenizer_config()
    return alone


def _through_stages(core: Any, batch: dict[str, Any], step: MegatronStep) -> Optional[Tensor]:
    """The teacher's logits ``[batch, sequence, vocabulary / tp]`` of a micro-batch on the last stage. None on other
    stages.

    A stage starts the next micro-batch while later stages process this one, so the pipeline fills.
    """
    packing = {"packed_seq_params": batch["packed_seq_params"]} if batch.get("packed_seq_params") is not None else {}

    def run() -> Tensor:
        inputs = {"position_ids": batch["position_ids"], "attention_mask": batch.get("attention_mask"), **packing}
        return core(input_ids=batch["tokens"], labels=None, **inputs)

    length = step.seq_length // core.config.context_parallel_size
    return through_stage(core, run, batch=step.micro_batch_size, length=length)


def _teacher(checkpoint: Checkpoint, trainer: pl.Trainer, student: Any) -> Any:
    """This rank's stage of the teacher, in the layout and the precision of the student, without gradients."""
    teacher = checkpoint.model()
    for field in fields(ModelParallelConfig):
        if not callable(value := getattr(student.config, field.name, None)):
            setattr(teacher.config, field.name, value)
    teacher.config.perform_initialization = False
    teacher.config.gradient_accumulation_fusion = False
    teacher.config.deallocate_pipeline_outputs = False
    strategy: Any = trainer.strategy
    teacher.configure_model()
    parallel = MegatronParallel(teacher, precision_plugin=strategy.precision_plugin, device=strategy.root_device)
    if strategy.root_device.type != "meta":
        io = strategy.checkpoint_io
        wanted = {"model": parallel.sharded_state_dict(io.load_content_metadata(checkpoint.path))}
        parallel.load_chunks_state_dict(io.load_checkpoint(checkpoint.path, sharded_state_dict=wanted)["model"])
        _log.info("The teacher %s is loaded.", checkpoint.path)
    parallel.eval().requires_grad_(False)
    return core_of(teacher)


def no_virtual_stages(size: int) -> str:
    """The reason why virtual stages are not supported."""
    return (
        f"virtual_pipeline_model_parallel_size={size}: distillation doesn't support virtual pipeline stages, because a "
        "teacher has one stage per rank. Leave virtual_pipeline_model_parallel_size unset."
    )


def _refuse_layout(strategy: Any, teacher: Any) -> None:
    """Check the teacher's layout.

    Raises:
        ConfigError: the teacher can't be built in the student's layout.
    """
    sizes = getattr(strategy, "layout", None)
    if sizes is None:
        raise ConfigError(
            f"distill requires a MegatronStrategy, but trainer.strategy is a {type(strategy).__name__}. Set "
            "trainer.strategy to a MegatronStrategy."
        )
    if (sizes.vp or 1) > 1:
        raise ConfigError(no_virtual_stages(sizes.vp))
    config = teacher.config
    for name, what, parts in (
        ("tensor_model_parallel_size", "num_attention_heads", sizes.tp),
        ("pipeline_model_parallel_size", "num_layers", sizes.pp),
        ("expert_model_parallel_size", "num_moe_experts", sizes.ep),
    ):
        value = getattr(config, what, None)
        if value and parts and value % parts:
            raise ConfigError(
                f"{name}={parts} does not divide the teacher's {what}={value}. Teacher and student have the same "
                f"layout, so {name} must divide {what} of both models. Set {name} to a divisor of both."
            )
