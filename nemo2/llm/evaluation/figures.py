# SPDX-License-Identifier: Apache-2.0
"""The scores of evaluations, by the names that loggers, a run's report and files use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo2.llm.evaluation.perplexity import Perplexity
from nemo2.training.run_dir.records import EVALUATION


def of_texts(perplexities: Mapping[str, Perplexity]) -> dict[str, float]:
    """The scores of texts: ``evaluation/<name of the file>/loss`` (nats per token) and ``.../bits_per_byte``. Files of one
    name also have as much of their folder as it takes to tell them apart."""
    figures: dict[str, float] = {}
    for name, perplexity in zip(names_of([Path(file) for file in perplexities]), perplexities.values(), strict=True):
        figures[f"{EVALUATION}{name}/loss"] = perplexity.loss
        figures[f"{EVALUATION}{name}/bits_per_byte"] = perplexity.bits_per_byte
    return figures


def of_tasks(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores of lm-eval's results as ``evaluation/<task>/<metric>``, without standard errors. The name of a filter
    follows that of its metric."""
    figures: dict[str, float] = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                figures[f"{EVALUATION}{task}/{metric}" + ("" if filtered == "none" else f"/{filtered}")] = float(value)
    return figures


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names that tell paths apart: the last parts of their paths, as many as it takes."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path}" for number, path in enumerate(paths, start=1)]
