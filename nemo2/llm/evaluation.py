# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model, loaded into a layout and measured: on texts, and on lm-eval's tasks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError, DataError
from nemo2.evaluation.harness import evaluate_tasks, refuse_unknown
from nemo2.evaluation.perplexity import Perplexity, perplexity_of
from nemo2.llm.inference import loaded


@configurable
def evaluate(
    path: str,
    tasks: Sequence[str],
    trainer: Optional[pl.Trainer] = None,
    task_folder: Optional[str] = None,
    num_fewshot: Optional[int] = None,
    limit: Optional[int] = None,
    max_batch_size: int = 8,
    random_seed: int = 1234,
    output_path: Optional[str] = None,
    trust_remote_code: bool = False,
    trust_tasks: bool = False,
) -> dict[str, Any]:
    """Score a checkpoint's model on lm-eval's tasks.

    Args:
        path: A checkpoint directory, or a run's.
        tasks: Names of lm-eval's, whose data come from a network or its cache, or of those in ``task_folder``.
        trainer: With a `MegatronStrategy` whose layout the weights are loaded into; replicas share the questions. None: one
            process, in fp32.
        task_folder: Tasks of one's own, as YAML files in lm-eval's form.
        num_fewshot: Solved examples before each question. None: as each task says.
        limit: Questions per task. None: all.
        max_batch_size: Texts that are read together.
        random_seed: Of the choice of examples.
        output_path: Write the results there too, as JSON. None: only return them.
        trust_remote_code: As for `nemo2.llm.generate`.
        trust_tasks: Let files of ``task_folder`` have code run: functions and classes that they name, scripts of metrics.

    Returns:
        lm-eval's ``{"results": {task: {metric: value}}, ...}``, the same on every rank.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
        ConfigError: lm-eval isn't installed, or there is no such task.
        SecurityError: a file of ``task_folder`` would have code run.
    """
    folder = None if task_folder is None else Path(task_folder)
    refuse_unknown(tasks, folder, trust_tasks=trust_tasks)
    with loaded(path, trainer, trust_remote_code=trust_remote_code) as model:
        results = evaluate_tasks(
            model,
            model.tokenizer,
            tasks,
            max_sequence_length=model.config.seq_length,
            task_folder=folder,
            num_fewshot=num_fewshot,
            limit=limit,
            max_batch_size=max_batch_size,
            seed=random_seed,
            trust_tasks=trust_tasks,
        )
    if output_path is not None and (trainer is None or trainer.is_global_zero):
        Path(output_path).write_text(json.dumps(results, indent=1, default=float) + "\n")
    return results


@configurable
def perplexity(
    path: str,
    files: Sequence[str],
    trainer: Optional[pl.Trainer] = None,
    stride: Optional[int] = None,
    max_batch_size: int = 8,
    trust_remote_code: bool = False,
) -> dict[str, Perplexity]:
    """How well a checkpoint's model predicts text files, each read from its first byte to its last.

    Args:
        path, trainer, trust_remote_code: As for `evaluate`.
        files: UTF-8 texts.
        stride, max_batch_size: See `nemo2.evaluation.perplexity.perplexity_of`.

    Returns:
        Of each file by its name.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
        DataError: a file can't be read as text, or is empty.
    """
    texts = [_text_of(Path(file)) for file in files]
    if not texts:
        raise ConfigError("perplexity needs at least one text file.")
    with loaded(path, trainer, trust_remote_code=trust_remote_code) as model:
        found = perplexity_of(
            model,
            model.tokenizer,
            texts,
            max_sequence_length=model.config.seq_length,
            stride=stride,
            max_batch_size=max_batch_size,
        )
    return dict(zip(files, found, strict=True))


def _text_of(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} can't be read as UTF-8 text: {error}.") from None
    if not text:
        raise DataError(f"{file} is empty.")
    return text
