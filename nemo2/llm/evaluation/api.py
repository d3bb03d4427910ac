# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint's model into a layout and evaluates it on texts and on lm-eval's tasks."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.files import output_file, text_of, write_file
from nemo2.config.capture import configurable
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.llm.evaluation import figures
from nemo2.llm.evaluation.harness import evaluate_tasks, refuse_counts, refuse_unknown
from nemo2.llm.evaluation.perplexity import Perplexity, perplexity_of, refuse_stride
from nemo2.llm.exported import exports_cache
from nemo2.llm.inference import loaded
from nemo2.training.run_dir.records import METRICS_FILE, add_evaluation
from nemo2.training.run_dir.report import write_report

_log = logging.getLogger(__name__)


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
    report: bool = True,
) -> dict[str, Any]:
    """Score a checkpoint's model on lm-eval's tasks.

    If an evaluation is interrupted, the next call with the same arguments continues with the answers so far. They are
    stored in ``evaluations`` beside `nemo2.llm.exported.exports_cache` until the evaluation is complete.

    Args:
        path: A checkpoint directory, a run's, or released weights (``hf://organisation/name``, or their folder).
        tasks: Names of lm-eval's tasks, whose data come from the network or its cache, or of tasks in ``task_folder``.
        trainer: A trainer with a `MegatronStrategy`; the weights are loaded into its layout, and replicas share the
            questions. None: one process, in fp32.
        task_folder: A folder with your own tasks, as YAML files in lm-eval's format.
        num_fewshot: Solved examples before each question. None: as each task says.
        limit: Questions per task. None: all.
        max_batch_size: Texts that are processed together.
        random_seed: The seed for the choice of examples.
        output_path: A JSON file that also receives the results. None: the results are only returned.
        trust_remote_code: As in `nemo2.llm.generate`.
        trust_tasks: Let files in ``task_folder`` run code: the functions, classes and metric scripts that they name.
        report: Add the scores to the report of the run that saved the checkpoint, if the checkpoint is in its folder.

    Returns:
        lm-eval's ``{"results": {task: {metric: value}}, ...}``, the same on every rank.

    Raises:
        CheckpointError: ``path`` holds no checkpoint, or the checkpoint doesn't describe its model.
        ConfigError: lm-eval isn't installed, a task is unknown, a number is out of range, or ``output_path`` is not writable.
        SecurityError: a file in ``task_folder`` would run code.
    """
    folder = None if task_folder is None else Path(task_folder)
    if output_path is not None:
        output_file(output_path)
    require_counts("", max_batch_size=max_batch_size)
    refuse_counts(limit=limit, num_fewshot=num_fewshot)
    refuse_unknown(tasks, folder, trust_tasks=trust_tasks)
    with loaded(path, trainer, trust_remote_code=trust_remote_code) as model:
        answers_file = _answers_file(path, model)
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
            answers_file=answers_file,
        )
    first = trainer is None or trainer.is_global_zero
    if first and report:
        _report(path, figures.of_tasks(results))
    if first and output_path is not None:
        write_file(output_path, json.dumps(results, indent=1, default=float) + "\n")
    if first and answers_file is not None:
        answers_file.unlink(missing_ok=True)  # only now: a full disk would have lost the answers with the results
    return results


@configurable
def perplexity(
    path: str,
    files: Sequence[str],
    trainer: Optional[pl.Trainer] = None,
    stride: Optional[int] = None,
    max_batch_size: int = 8,
    trust_remote_code: bool = False,
    report: bool = True,
) -> dict[str, Perplexity]:
    """Measure how well a checkpoint's model predicts text files, each from its first byte to its last.

    Args:
        path, trainer, trust_remote_code, report: As in `evaluate`.
        files: UTF-8 texts.
        stride, max_batch_size: See `nemo2.llm.evaluation.perplexity.perplexity_of`.

    Returns:
        The perplexity of each file, by the file's name.

    Raises:
        CheckpointError: ``path`` holds no checkpoint, or the checkpoint doesn't describe its model.
        DataError: a file is unreadable as text, or empty.
    """
    require_counts("", max_batch_size=max_batch_size)
    texts = [text_of(Path(file)) for file in files]
    if not texts:
        raise ConfigError("perplexity requires at least one text file.")

    def fits(model: Any) -> None:
        refuse_stride(stride, model.config.seq_length)

    with loaded(path, trainer, trust_remote_code=trust_remote_code, before=fits) as model:
        perplexities = perplexity_of(
            model,
            model.tokenizer,
            texts,
            max_sequence_length=model.config.seq_length,
            stride=stride,
            max_batch_size=max_batch_size,
            share=True,
        )
    by_file = dict(zip(files, perplexities, strict=True))
    if report and (trainer is None or trainer.is_global_zero):
        _report(path, figures.of_texts(by_file))
    return by_file


def _answers_file(path: str, model: Any) -> Optional[Path]:
    """The file of answers of this checkpoint, in the dtype that it is computed in. None: nothing identifies it."""
    identity = Checkpoint.open(path).identity
    name = f"{identity[:32]}-{str(model.config.params_dtype).removeprefix('torch.')}-{model.config.seq_length}.jsonl"
    return exports_cache().parent / "evaluations" / name if identity else None


def _report(path: str, scores: Mapping[str, float]) -> None:
    """Show the scores beside the loss. If the folder isn't writable, report that its page stays unchanged. Only nemo2's
    checkpoints have a run."""
    checkpoint = Checkpoint.open(path)
    run_dir, manifest = checkpoint.path.parent.parent, checkpoint.manifest
    if manifest is None or not (run_dir / METRICS_FILE).is_file():
        return
    try:
        add_evaluation(run_dir, step=manifest.step - 1, checkpoint=checkpoint.path.name, figures=scores)
        _log.info("report: %s", write_report(run_dir))
    except (OSError, Nemo2Error) as error:
        _log.warning("The report of %s does not contain these figures: %s", run_dir, error)
