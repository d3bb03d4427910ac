# SPDX-License-Identifier: Apache-2.0
"""``nemo2 evaluate``: measures a checkpoint on texts and on lm-eval's tasks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.begin_from import Weights, WeightsOption, named_weights
from nemo2.cli.commands import only_with
from nemo2.cli.flags import AsJson, print_json

EVALUATE_EXAMPLE = "Example: nemo2 evaluate runs/first --text README.md"


def register(app: typer.Typer) -> None:
    app.command("evaluate", epilog=EVALUATE_EXAMPLE)(evaluate)


def evaluate(
    checkpoint: Weights = None,
    source: WeightsOption = None,
    text: Annotated[
        Optional[list[Path]],
        typer.Option(help="Text file; reports loss, perplexity and bits per byte. May be repeated."),
    ] = None,
    tasks: Annotated[
        Optional[str], typer.Option(help="lm-eval tasks, separated by commas; requires the extra `evaluate`.")
    ] = None,
    include: Annotated[Optional[Path], typer.Option(help="Directory with your own tasks, in lm-eval's format.")] = None,
    trust_tasks: Annotated[
        bool,
        typer.Option("--trust-tasks", help="Allow --include's files to run code: functions and metric scripts."),
    ] = False,
    fewshot: Annotated[
        Optional[int], typer.Option(min=0, help="Number of solved examples before each question.")
    ] = None,
    limit: Annotated[Optional[int], typer.Option(min=1, help="Maximum number of questions per task.")] = None,
    stride: Annotated[Optional[int], typer.Option(min=1, help="With --text: new tokens per window.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of texts per batch.")] = 8,
    output: Annotated[
        Optional[Path], typer.Option(help="Also write the results of --tasks to this file, as JSON.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the model of a checkpoint on text files or lm-eval tasks, in this process."""
    from nemo2.errors import ConfigError

    only_with("tasks", "include", "trust_tasks", "fewshot", "limit", "output")
    only_with("include", "trust_tasks")
    only_with("text", "stride")
    if not text and not tasks:
        raise ConfigError("evaluate needs --text FILE or --tasks NAME.")
    path = named_weights(checkpoint, source)
    if tasks:
        from nemo2.evaluation.harness import require_lm_eval

        require_lm_eval()  # before the texts, which take a while
    found: dict[str, Any] = {}
    if text:
        from nemo2.llm.evaluation import perplexity

        measured = perplexity(path, [str(file) for file in text], stride=stride, max_batch_size=batch_size)
        found["texts"] = {name: _figures(one) for name, one in measured.items()}
        if not as_json:
            print("\n".join(_of_texts(measured)))
    if tasks:
        from nemo2.llm.evaluation import evaluate as entry

        results = entry(
            path,
            [name.strip() for name in tasks.split(",")],
            task_folder=None if include is None else str(include),
            num_fewshot=fewshot,
            limit=limit,
            max_batch_size=batch_size,
            output_path=None if output is None else str(output),
            trust_tasks=trust_tasks,
        )
        found["tasks"] = results["results"]
        if not as_json:
            print("\n".join(_of_tasks(results)))
    if as_json:
        print_json(found)


def _figures(one: Any) -> dict[str, float]:
    names = ("num_bytes", "num_tokens", "loss", "perplexity", "bits_per_byte")
    return {name: getattr(one, name) for name in names}


def _of_texts(found: Mapping[str, Any]) -> list[str]:
    from nemo2.columns import columns

    rows = list(found.items())
    if len(rows) > 1:
        first, *others = found.values()
        rows.append(("all", sum(others, first)))
    head = ("text", "bytes", "tokens", "loss", "perplexity", "bits per byte")
    cells = [
        (name, one.num_bytes, one.num_tokens, f"{one.loss:.4f}", f"{one.perplexity:.2f}", f"{one.bits_per_byte:.4f}")
        for name, one in rows
    ]
    return columns(cells, head=head, right=range(1, 6))


def _of_tasks(results: dict[str, Any]) -> list[str]:
    """A row per task and metric, with its standard error where there is one."""
    from nemo2.columns import columns

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
