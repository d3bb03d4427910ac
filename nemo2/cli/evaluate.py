# SPDX-License-Identifier: Apache-2.0
"""``nemo2 evaluate``: measures a checkpoint on texts, on lm-eval's tasks, or on the validation data of a recipe."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.columns import columns
from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing, text_of
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.begin_from import Weights, WeightsOption, named_weights, use_model_of
from nemo2.cli.commands import as_json, only_with, refuse_all_but
from nemo2.cli.flags import Output, OverwriteFile, Performance, set_on_command_line
from nemo2.cli.launching import LAUNCHING, LaunchOptions, changes_of, launched, logged
from nemo2.cli.own_data import Data
from nemo2.cli.sources import Overrides, name_of_run, recipe_tree, run_with_recipe

_FIGURES = ("num_bytes", "num_tokens", "loss", "perplexity", "bits_per_byte")


def evaluate(
    checkpoint: Weights = None,
    overrides: Overrides = None,
    *,
    source: WeightsOption = None,
    text: Optional[list[Path]] = None,
    tasks: Optional[str] = None,
    include: Optional[Path] = None,
    trust_tasks: bool = False,
    fewshot: Annotated[Optional[int], typer.Option(min=0)] = None,
    limit: Annotated[Optional[int], AT_LEAST_1] = None,
    stride: Annotated[Optional[int], AT_LEAST_1] = None,
    batch_size: Annotated[int, AT_LEAST_1] = 8,
    output: Output = None,
    overwrite: OverwriteFile = False,
    recipe: Optional[str] = None,
    data: Data = None,
    performance: Performance = False,
    options: LaunchOptions = LAUNCHING,
) -> Result:
    """Evaluate a checkpoint on texts, tasks or validation data.

    Text files and lm-eval tasks are evaluated in this process.

    Without --text and --tasks, computes the validation loss in the layout of the checkpoint's run or of --recipe. Without
    CHECKPOINT, with the checkpoint that the recipe would resume from.

    Args:
        text: Text file; reports loss, perplexity and bits per byte. May be repeated.
        tasks: lm-eval tasks, separated by commas; requires the extra `evaluate`.
        include: Directory with your own tasks, in lm-eval's format.
        trust_tasks: Allow --include's files to run code: functions and metric scripts.
        fewshot: Number of solved examples before each question.
        limit: Maximum number of questions per task.
        stride: With --text: new tokens per window.
        batch_size: Number of texts per batch.
        output: Also write the results of --tasks to this file, as JSON.
        recipe: The recipe whose validation data and layout are used.

    Example: nemo2 evaluate runs/first --text README.md
    """
    only_with("tasks", "include", "trust_tasks", "fewshot", "limit", "output")
    only_with("include", "trust_tasks")
    only_with("output", "overwrite")
    only_with("text", "stride")
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if tasks is not None and not names:
        raise ConfigError(f"--tasks {tasks!r}: name at least one task, such as arc_easy.")
    if text or names:
        measured = (
            "text",
            "tasks",
            "include",
            "trust_tasks",
            "fewshot",
            "limit",
            "stride",
            "batch_size",
            "output",
            "overwrite",
        )
        refuse_all_but("checkpoint", "source", "as_json", *measured, why="with --text or --tasks")
        if output is not None:
            refuse_existing(output, overwrite=overwrite)
        lm_eval = {
            "task_folder": None if include is None else str(include),
            "num_fewshot": fewshot,
            "limit": limit,
            "output_path": None if output is None else str(output),
            "trust_tasks": trust_tasks,
        }
        return _measured(named_weights(checkpoint, source), text or [], names, stride, batch_size, lm_eval)
    launching = (field.name for field in fields(LaunchOptions))
    own = ("checkpoint", "source", "overrides", "recipe", "data", "performance")
    refuse_all_but(*own, *launching, why="with validation data")
    overrides = overrides or []
    if checkpoint is not None and "=" in checkpoint and not Path(checkpoint).exists():
        checkpoint, overrides = None, [checkpoint, *overrides]  # the first change of a command without a checkpoint
    if checkpoint is None and source is None and recipe is None:
        raise ConfigError("evaluate needs a checkpoint, such as a run, or --recipe NAME for the checkpoint of its run.")
    weights = None if checkpoint is None and source is None else named_weights(checkpoint, source)
    _validate(weights, overrides, recipe, data, performance=performance, options=options)
    return Result(None)


def _measured(
    path: str, texts: list[Path], tasks: list[str], stride: Optional[int], batch_size: int, lm_eval: dict[str, Any]
) -> Result:
    if tasks:
        from nemo2.llm.evaluation.harness import require_lm_eval

        require_lm_eval()  # before the texts, which take a while
    for file in texts:
        text_of(file)  # refused before torch is imported
    report: dict[str, Any] = {}
    if texts:
        from nemo2.llm.evaluation.api import perplexity

        measured = perplexity(path, [str(file) for file in texts], stride=stride, max_batch_size=batch_size)
        report["texts"] = {name: {field: getattr(one, field) for field in _FIGURES} for name, one in measured.items()}
        if not as_json():
            print("\n".join(_of_texts(measured)))
    if not tasks:
        return Result(report)
    from nemo2.llm.evaluation.api import evaluate as entry

    results = entry(path, tasks, max_batch_size=batch_size, **lm_eval)
    report["tasks"] = results["results"]
    return Result(report, "\n".join(_of_tasks(results)))


def _validate(
    weights: Optional[str],
    overrides: list[str],
    recipe: Optional[str],
    data: Optional[str],
    *,
    performance: bool,
    options: LaunchOptions = LAUNCHING,
) -> None:
    """Compute the loss of ``weights`` on the validation data of ``recipe``; None: the recipe of their run. Without weights,
    of the checkpoint that the recipe would resume from."""
    from nemo2 import AutoResume, RestoreConfig
    from nemo2.config import Config, Partial
    from nemo2.llm.api import refuse_no_validation
    from nemo2.llm.api import validate as entry
    from nemo2.mcore.settle.agreement import tokenizer_choice

    name = recipe or str(run_with_recipe(weights or ""))
    start = Config(AutoResume, restore_config=Config(RestoreConfig, path=weights))

    def recipe_of_weights() -> Any:
        tree = recipe_tree(name, performance=performance)
        if weights is not None and recipe is not None:
            start.restore_config.path = use_model_of(tree, weights)
        return tree

    def own_name(tree: Any) -> Optional[str]:
        own = name_of_run(name, tree)
        return own if weights is None else f"{own}_validate"

    tree = logged(recipe_of_weights, overrides, own_name=own_name, options=options, data=data)
    refuse_no_validation(tree.trainer)
    if weights is not None:
        _refuse_other_start(tree, weights)
    else:
        start = _start_of_run(tree)
        tree.log.name = f"{tree.log.name}_validate"  # the run that is measured keeps its files
    parts = {field: getattr(tree, field) for field in ("model", "data", "trainer", "log", "optim")}
    parts["tokenizer"] = tokenizer_choice(tree)
    parts["model_transform"] = getattr(tree, "peft", None) or getattr(tree, "model_transform", None)
    changes = changes_of(overrides, data, performance)
    launched(Partial(entry, **parts, resume=start), name=name, changes=changes, options=options)


def _start_of_run(recipe: Any) -> Any:
    """The start of a run that measures what ``recipe`` would resume, or the weights that it names itself.

    Raises:
        ConfigError: it names none, and there is no run to resume.
    """
    from nemo2 import AutoResume, RestoreConfig
    from nemo2.checkpoint.auto_resume import starts_from_weights
    from nemo2.checkpoint.directory import finished
    from nemo2.config import Config
    from nemo2.preflight.checks.earlier import checkpoints_to_resume

    directory = checkpoints_to_resume(recipe)
    if directory is not None and finished(directory):
        return Config(AutoResume, restore_config=Config(RestoreConfig, path=str(directory)))
    resume = recipe.resume
    if starts_from_weights(resume, recipe.trainer.strategy) or getattr(resume, "resume_from_directory", None):
        return resume
    raise ConfigError(
        f"The recipe has no weights to evaluate: this machine has no run {recipe.log.name!r} with a checkpoint. Name a "
        "checkpoint or a run, as in nemo2 evaluate CHECKPOINT --recipe NAME, or the run's folder with --dir and --name."
    )


def _refuse_other_start(recipe: Any, checkpoint: str) -> None:
    """Raise ConfigError if the command line names a start besides the checkpoint, which replaces ``recipe.resume``."""
    import fiddle as fdl

    from nemo2.config.walk import iterate_nodes

    for place, node in iterate_nodes(recipe.resume):
        for field in node.__arguments__:
            if set_on_command_line(node, field) and not isinstance(getattr(node, field), fdl.Buildable):
                path = ".".join(part for part in ("resume", place, field) if part)
                raise ConfigError(f"{checkpoint} contradicts {path}={getattr(node, field)}: leave one of them out.")


def _of_texts(measured: Mapping[str, Any]) -> list[str]:
    rows = list(measured.items())
    if len(rows) > 1:
        first, *others = measured.values()
        rows.append(("all", sum(others, first)))
    head = ("text", "bytes", "tokens", "loss", "perplexity", "bits per byte")
    cells = [
        (name, one.num_bytes, one.num_tokens, f"{one.loss:.4f}", f"{one.perplexity:.2f}", f"{one.bits_per_byte:.4f}")
        for name, one in rows
    ]
    return columns(cells, head=head, right=range(1, 6))


def _of_tasks(results: dict[str, Any]) -> list[str]:
    """A row per task and metric, with its standard error where there is one."""
    cells = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            shown = f"± {error:.4f}" if isinstance(error, int | float) else ""
            cells.append((task, metric if filtered == "none" else f"{metric} ({filtered})", f"{value:.4f}", shown))
    return columns(cells, head=("task", "metric", "value", ""), right=(2,))
