# SPDX-License-Identifier: Apache-2.0
"""Measures the model on texts and on tasks while it trains."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.callbacks.steps import count_problems
from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.evaluation import figures
from nemo2.evaluation.harness import evaluate_tasks, refuse_unknown
from nemo2.evaluation.perplexity import perplexity_of, text_of
from nemo2.models.decoding import core_of, refuse_layouts
from nemo2.run_dir.hang import HangWatchdog


@configurable
class EvaluationCallback(pl.Callback):
    """Every so many steps, and after the last one, tells how well the model predicts texts and what it scores on lm-eval's tasks.

    ``evaluation/<file>/loss`` (nats per token) and ``evaluation/<file>/bits_per_byte``, ``evaluation/<task>/<metric>``: in the
    loggers, in ``metrics.jsonl``, in the report beside the loss, and for `ModelCheckpoint` to monitor. Training waits meanwhile,
    on every rank; data-parallel replicas share the work. What is trained is the same as without: the generators of random
    numbers are left as they were. Steps in between cost a comparison.

    Args:
        every_n_steps: Optimizer steps between two evaluations. None: only after the last one.
        texts: UTF-8 files.
        tasks: Names of lm-eval's tasks, or of those in ``task_folder``; needs the extra ``evaluate``.
        task_folder: Tasks of one's own, as YAML files in lm-eval's form.
        num_fewshot: Solved examples before each question. None: as each task says.
        limit: Questions per task. None: all.
        max_batch_size: Texts that a replica reads together.
        at_end: Evaluate after the last step, whatever its number.
        trust_tasks: As for `nemo2.llm.evaluate`.

    Raises:
        ConfigError: there is nothing to measure, or never; at the start of training, the strategy or its layout can't be
            measured (context parallelism, virtual stages), there is no tokenizer, lm-eval, or task of a name.
        DataError: at the start of training, a file can't be read as text, or is empty.
        SecurityError: at the start of training, a file of ``task_folder`` would have code run.
    """

    def __init__(
        self,
        every_n_steps: Optional[int] = None,
        texts: Optional[list[str]] = None,
        tasks: Optional[list[str]] = None,
        task_folder: Optional[str] = None,
        num_fewshot: Optional[int] = None,
        limit: Optional[int] = None,
        max_batch_size: int = 8,
        at_end: bool = True,
        trust_tasks: bool = False,
    ) -> None:
        problems = [
            *(
                []
                if every_n_steps is None
                else count_problems("EvaluationCallback", "every_n_steps", every_n_steps, least=1)
            ),
            *count_problems("EvaluationCallback", "max_batch_size", max_batch_size, least=1),
        ]
        if problems:
            raise ConfigError(problems[0])
        if not texts and not tasks:
            raise ConfigError("EvaluationCallback has nothing to measure: set texts=[FILE], or tasks=[NAME].")
        if every_n_steps is None and not at_end:
            raise ConfigError(
                "EvaluationCallback would never measure: set every_n_steps=100, say, or leave at_end=True."
            )
        self.every_n_steps = every_n_steps
        self.texts = list(texts or [])
        self.tasks = list(tasks or [])
        self.task_folder = task_folder
        self.num_fewshot = num_fewshot
        self.limit = limit
        self.max_batch_size = max_batch_size
        self.at_end = at_end
        self.trust_tasks = trust_tasks
        self._read: dict[str, str] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if core_of(pl_module) is None:
            raise ConfigError(
                f"EvaluationCallback measures Megatron-Core's language models; {type(pl_module).__name__} under "
                f"{type(trainer.strategy).__name__} is none. Take the callback out, and run nemo2 evaluate on its checkpoints."
            )
        refuse_layouts(True)
        if getattr(pl_module, "tokenizer", None) is None:
            raise ConfigError("EvaluationCallback reads texts, and neither the model nor the data has a tokenizer.")
        self._read = {file: text_of(Path(file)) for file in self.texts}
        if self.tasks:
            refuse_unknown(self.tasks, self._folder, trust_tasks=self.trust_tasks)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.global_step
        regular = self.every_n_steps is not None and done % self.every_n_steps == 0
        if regular or self.at_end and done == trainer.max_steps:
            self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parallel: Any = trainer.strategy.megatron_parallel  # pyright: ignore[reportAttributeAccessIssue]
        parallel.pause_param_gather()
        try:
            found = self._measured(pl_module, lambda: _tell_watchdogs(trainer))
        finally:
            parallel.resume_param_gather()
        for name, value in found.items():
            pl_module.log(name, value, logger=False, batch_size=1)
        step = trainer.global_step - 1
        for logger in trainer.loggers:
            logger.log_metrics({**found, "global_step": float(step)}, step=step)

    def _measured(self, model: Any, on_progress: Callable[[], None]) -> dict[str, float]:
        found: dict[str, float] = {}
        length = model.config.seq_length
        if self._read:
            texts = perplexity_of(
                model,
                model.tokenizer,
                list(self._read.values()),
                max_sequence_length=length,
                max_batch_size=self.max_batch_size,
                share=True,
            )
            found |= figures.of_texts(dict(zip(self._read, texts, strict=True)))
            on_progress()
        if self.tasks:
            results = evaluate_tasks(
                model,
                model.tokenizer,
                self.tasks,
                max_sequence_length=length,
                task_folder=self._folder,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                max_batch_size=self.max_batch_size,
                trust_tasks=self.trust_tasks,
                on_progress=on_progress,
            )
            found |= figures.of_tasks(results)
        return found

    @property
    def _folder(self) -> Optional[Path]:
        return None if self.task_folder is None else Path(self.task_folder)


def _tell_watchdogs(trainer: pl.Trainer) -> None:
    """An evaluation that goes on is no hang."""
    callbacks: Sequence[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, HangWatchdog):
            callback.on_validation_batch_end(trainer)
