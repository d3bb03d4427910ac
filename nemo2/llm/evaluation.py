# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model, loaded into a layout and measured: on texts, and on lm-eval's tasks."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.checkpoint.digests import digest_of_checkpoint
from nemo2.checkpoint.directory import read_manifest
from nemo2.config.capture import configurable
from nemo2.errors import ConfigError, Nemo2Error
from nemo2.evaluation import figures
from nemo2.evaluation.harness import evaluate_tasks, refuse_unknown
from nemo2.evaluation.perplexity import Perplexity, perplexity_of, text_of
from nemo2.llm.exported import exports_cache
from nemo2.llm.inference import find_checkpoint, loaded, refuse_no_place
from nemo2.run_dir.records import METRICS_FILE, add_evaluation
from nemo2.run_dir.report import write_report

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
        report: Add the figures to the report of the run that saved the checkpoint, where its folder is around it.

    An evaluation that is interrupted goes on with the answers that it had when it is called again: they lie in
    ``evaluations`` beside `nemo2.llm.exported.exports_cache` until it is done.

    Returns:
        lm-eval's ``{"results": {task: {metric: value}}, ...}``, the same on every rank.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
        ConfigError: lm-eval isn't installed, there is no such task, or ``output_path`` can't be written.
        SecurityError: a file of ``task_folder`` would have code run.
    """
    folder = None if task_folder is None else Path(task_folder)
    refuse_no_place(output_path)
    refuse_unknown(tasks, folder, trust_tasks=trust_tasks)
    checkpoint = find_checkpoint(Path(path))
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
            answers_file=_answers_file(checkpoint, model),
        )
    first = trainer is None or trainer.is_global_zero
    if first and report:
        _report(checkpoint, figures.of_tasks(results))
    if first and output_path is not None:
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
    report: bool = True,
) -> dict[str, Perplexity]:
    """How well a checkpoint's model predicts text files, each read from its first byte to its last.

    Args:
        path, trainer, trust_remote_code, report: As for `evaluate`.
        files: UTF-8 texts.
        stride, max_batch_size: See `nemo2.evaluation.perplexity.perplexity_of`.

    Returns:
        Of each file by its name.

    Raises:
        CheckpointError: no checkpoint there, or it doesn't describe its model.
        DataError: a file can't be read as text, or is empty.
    """
    texts = [text_of(Path(file)) for file in files]
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
            share=True,
        )
    by_file = dict(zip(files, found, strict=True))
    if report and (trainer is None or trainer.is_global_zero):
        _report(find_checkpoint(Path(path)), figures.of_texts(by_file))
    return by_file


def _answers_file(checkpoint: Path, model: Any) -> Optional[Path]:
    """Of the weights, in the dtype that they are computed with."""
    digest = digest_of_checkpoint(checkpoint)
    name = f"{digest[:32]}-{str(model.config.params_dtype).removeprefix('torch.')}-{model.config.seq_length}.jsonl"
    return exports_cache().parent / "evaluations" / name if digest else None


def _report(checkpoint: Path, found: Mapping[str, float]) -> None:
    """Show the figures beside the loss. A folder that can't be written to keeps its report, which is said."""
    run_dir, manifest = checkpoint.absolute().parent.parent, read_manifest(checkpoint)
    if manifest is None or not (run_dir / METRICS_FILE).is_file():
        return
    try:
        add_evaluation(run_dir, step=manifest.step - 1, checkpoint=checkpoint.name, figures=found)
        _log.info("report: %s", write_report(run_dir))
    except (OSError, Nemo2Error) as error:
        _log.warning("The report of %s doesn't have these figures: %s", run_dir, error)
