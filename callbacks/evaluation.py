# SPDX-License-Identifier: Apache-2.0
"""Evaluates the model on texts and on tasks during training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch

from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.files import text_of
from nemo2.checkpoint.model_checkpoint import ends_now
from nemo2.config.capture import configurable
from nemo2.llm.evaluation import figures
from nemo2.llm.evaluation.harness import evaluate_tasks, refuse_counts, refuse_unknown
from nemo2.llm.evaluation.perplexity import perplexity_of, tokens_of
from nemo2.models.decoding import core_of, refuse_layouts
from nemo2.training.run_dir.hang import HangWatchdog


@configurable
class EvaluationCallback(pl.Callback):
    """Measure the loss on text files and the scores on lm-eval tasks at an interval and after the last step.

    The callback logs ``evaluation/<file>/loss`` (nats per token), ``evaluation/<file>/bits_per_byte`` and
    ``evaluation/<task>/<metric>``. The values go to the loggers, to ``metrics.jsonl`` and to the report, and
    `ModelCheckpoint` can monitor them.

    Training waits on every rank while an evaluation runs, and data-parallel replicas share the work. The random-number
    generators are restored, so the trained parameters are the same as without the callback. Steps without an evaluation
    cost one comparison.

    Args:
        every_n_steps: Optimizer steps between two evaluations. None: evaluate only after the last step.
        texts: UTF-8 files.
        tasks: Names of lm-eval tasks or of tasks in ``task_folder``. Needs the extra ``evaluate``.
        task_folder: A folder with your own tasks, as YAML files in lm-eval's format.
        num_fewshot: Solved examples before each question. None: as each task says.
        limit: Questions per task. None: all.
        max_batch_size: Texts that a replica processes together.
        at_end: Evaluate after the last step, whatever ends training: ``max_steps``, ``max_epochs``, ``max_time``, early
            stopping. A run that a signal or an error ends is not evaluated.
        trust_tasks: As in `nemo2.llm.evaluate`.

    Raises:
        ConfigError: there is nothing to evaluate or no step to evaluate at. At the start of training: the strategy or
            the layout is not supported (context parallelism, virtual stages), or a tokenizer, lm-eval or a task is
            missing.
        DataError: at the start of training, if a text file is unreadable or empty, or the tokenizer can't read text.
        SecurityError: at the start of training, if a file in ``task_folder`` would run code.
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
        require_counts("EvaluationCallback", others=(None,), every_n_steps=every_n_steps)
        require_counts("EvaluationCallback", max_batch_size=max_batch_size)
        refuse_counts(limit=limit, num_fewshot=num_fewshot)
        if not texts and not tasks:
            raise ConfigError("EvaluationCallback has nothing to measure. Set texts=[FILE] or tasks=[NAME].")
        if every_n_steps is None and not at_end:
            raise ConfigError(
                "EvaluationCallback would never run. Set every_n_steps (for example 100), or leave at_end=True."
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
        self._contents: dict[str, str] = {}
        self._evaluated_step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if core_of(pl_module) is None:
            raise ConfigError(
                f"EvaluationCallback measures language models of Megatron-Core only, not {type(pl_module).__name__} "
                f"under {type(trainer.strategy).__name__}. Remove the callback, and run `nemo2 evaluate` on the "
                "checkpoints."
            )
        refuse_layouts()
        if getattr(pl_module, "tokenizer", None) is None:
            raise ConfigError(
                "EvaluationCallback reads texts, but neither the model nor the data has a tokenizer. Set "
                "model.tokenizer or data.tokenizer."
            )
        self.check_files()
        # A tokenizer that can't read text would end the run at its first evaluation. The beginning of a text stands for all
        # of it, which takes minutes for a large one, and a task's name for its questions.
        tokens_of(pl_module.tokenizer, [text[:10_000] for text in (*self._contents.values(), *self.tasks)])

    def check_files(self) -> None:
        """Read the texts and look up the tasks. The errors are those of the start of training."""
        self._contents = {file: text_of(Path(file)) for file in self.texts}
        if self.tasks:
            refuse_unknown(self.tasks, self._folder, trust_tasks=self.trust_tasks)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        done = trainer.global_step
        regular = self.every_n_steps is not None and done % self.every_n_steps == 0
        # A last step that is known as such is evaluated before a regular save of it, which then records the figures.
        if regular or self.at_end and ends_now(trainer):
            for name, value in self._evaluate(trainer, pl_module).items():
                pl_module.log(name, value, logger=False, batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.at_end and self._evaluated_step != trainer.global_step:
            results = self._evaluate(trainer, pl_module)
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in results.items()})

    def _evaluate(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, float]:
        parallel: Any = trainer.strategy.megatron_parallel  # pyright: ignore[reportAttributeAccessIssue]
        parallel.pause_param_gather()
        try:
            results = self._measure(pl_module, lambda: _reset_watchdogs(trainer))
        finally:
            parallel.resume_param_gather()
        self._evaluated_step = trainer.global_step
        step = trainer.global_step - 1
        for logger in trainer.loggers:
            logger.log_metrics({**results, "global_step": float(step)}, step=step)
        return results

    def _measure(self, model: Any, on_progress: Callable[[], None]) -> dict[str, float]:
        results: dict[str, float] = {}
        length = model.config.seq_length
        if self._contents:
            texts = perplexity_of(
                model,
                model.tokenizer,
                list(self._contents.values()),
                max_sequence_length=length,
                max_batch_size=self.max_batch_size,
                share=True,
            )
            results |= figures.of_texts(dict(zip(self._contents, texts, strict=True)))
            on_progress()
        if self.tasks:
            scores = evaluate_tasks(
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
            results |= figures.of_tasks(scores)
        return results

    @property
    def _folder(self) -> Optional[Path]:
        return None if self.task_folder is None else Path(self.task_folder).expanduser()


def _reset_watchdogs(trainer: pl.Trainer) -> None:
    """Report progress to the hang watchdogs, so that a long evaluation doesn't count as a hang."""
    callbacks: Sequence[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, HangWatchdog):
            callback.on_validation_batch_end(trainer)
