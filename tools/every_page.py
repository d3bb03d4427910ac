# SPDX-License-Identifier: Apache-2.0
"""Every page and picture that nemo2 makes, for `tools.screenshots`: by name, the function that writes it as an HTML file.

Recipes are real; runs, traces and completions are made up, and written by nemo2's own loggers.
"""

import contextlib
import io
import json
import math
import random
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import yaml

from tools.figures import FIGURES


def command(*words: str) -> Callable[[Path], None]:
    """Run a command of nemo2. It writes to the path in place of ``{}``."""

    def make(target: Path) -> None:
        from nemo2.cli.app import main

        with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(told):
            main([word.format(target) for word in words])
        if not target.is_file():
            raise RuntimeError(f"nemo2 {' '.join(words)}: {told.getvalue()}")

    return make


def run_in(folder: Path, name: str, *, steps: int, seed: int, stops: tuple[tuple[int, int], ...] = ()) -> Path:
    """The directory of a run; ``stops`` are steps at which it was stopped, and from which it was resumed."""
    from nemo2.training.run_dir.metrics import JSONLLogger

    chance, run = random.Random(seed), folder / name / "2026-01-31_12-00-00"
    run.mkdir(parents=True, exist_ok=True)
    for file in run.iterdir():
        file.unlink()
    done = 0
    for until, back in (*stops, (steps, steps)):
        log = JSONLLogger(str(run))
        log.resume_at(done)
        for step in range(done, until):
            loss = (
                1.9 + 9 * math.exp(-step / (steps / 14)) + chance.gauss(0, 0.06) * (4 if chance.random() < 0.01 else 1)
            )
            metrics = {
                "reduced_train_loss": loss, "lr": 3e-4 * min(1, (step + 1) / 100) * (1 - 0.9 * step / steps),
                "grad_norm": abs(chance.gauss(0.6, 0.15)) + 3 * math.exp(-step / 40), "consumed_samples": 512.0 * (step + 1),
                "train_step_timing in s": 41.0 if step == done else abs(chance.gauss(8.3, 0.08)),
                "tokens_per_second": 506_000 + chance.gauss(0, 3000), "tflops_per_gpu": 398 + chance.gauss(0, 3),
            }  # fmt: skip
            log.log_metrics(metrics, step=step)
            if (step + 1) % (steps // 8) == 0:
                log.log_metrics({"val_loss": loss + 0.05}, step=step)
        log.finalize("success")
        done = back
    settings: dict[str, Any] = {
        "model": {"class": "nemo2.models.llama.LlamaModel", "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336},
        "data": {"class": "nemo2.data.pretraining.PreTrainingDataModule", "seq_length": 8192, "global_batch_size": 512},
        "trainer": {"max_steps": steps, "num_nodes": 1, "world_size": 8},
        "strategy": {"class": "nemo2.training.strategy.MegatronStrategy", "tensor_model_parallel_size": 1,
        "context_parallel_size": 2}, "optimizer": {"optimizer": "adam", "lr": 3e-4, "weight_decay": 0.1, "adam_beta1":
        0.9, "adam_beta2": 0.95},
    }  # fmt: skip
    (run / "effective_config.yaml").write_text(yaml.safe_dump(settings))
    versions = {"python": "3.12", "torch": "2.9", "megatron-core": "0.16.1"}
    surroundings = {
        "host": "node-17",
        "devices": ["NVIDIA H100 80GB HBM3"] * 8,
        "world_size": 8,
        "versions": versions,
        "command_line": [
            "nemo2",
            "pretrain",
            "llama3_8b",
            f"trainer.max_steps={steps}",
            "data.paths=/data/corpus/part-0",
        ],
    }
    (run / "environment.json").write_text(json.dumps(surroundings))
    return run


def report(target: Path, *, steps: int, stops: tuple[tuple[int, int], ...]) -> None:
    from nemo2.training.run_dir.report import write_report

    run = run_in(target.with_suffix(""), "llama3_8b", steps=steps, seed=1, stops=stops)
    target.write_text(write_report(run).read_text(encoding="utf-8"), encoding="utf-8")


def loss_curve(target: Path) -> None:
    from nemo2.training.run_dir.run_folder import RunFolder

    run = run_in(target.with_suffix(""), "llama3_8b", steps=1000, seed=2, stops=((420, 400), (421, 400), (700, 700)))
    target.write_text(bare(f"<div class='scroll'>{RunFolder(run).plot()}</div>"), encoding="utf-8")


def compared(target: Path) -> None:
    from nemo2.training.run_dir.compare import comparison_page
    from nemo2.training.run_dir.run_folder import RunFolder

    folder = target.with_suffix("")
    runs = [
        RunFolder(run_in(folder, name, steps=600, seed=seed))
        for seed, name in enumerate(("llama3_8b", "llama3_8b_higher_learning_rate", "llama3_8b_tp2"))
    ]
    changes = [("optim.config.lr", [3e-4, 6e-4, 3e-4]), ("trainer.strategy.tensor_model_parallel_size", [1, 1, 2])]
    target.write_text(comparison_page(runs, changes), encoding="utf-8")


def overlap(target: Path) -> None:
    from nemo2.report.trace.events import COMPUTE, RankTrace, Span
    from nemo2.report.trace.report import render

    chance, traces = random.Random(3), []
    for rank in range(2):
        spans, at = [], 0.0
        for _ in range(120):
            busy = chance.uniform(200, 900)
            spans.append(Span(kind=COMPUTE, name="gemm", start=at, end=at + busy))
            for kind, early, size in (("tp", 0.7, 2**20), ("dp", 0.3, 2**26), ("pp", 0.9, 2**18), ("ep", 0.95, 2**22)):
                if chance.random() < 0.6:
                    spans.append(
                        Span(
                            kind=kind,
                            name=kind,
                            start=at + early * busy,
                            end=at + busy * (early + 0.4),
                            size_bytes=size,
                        )
                    )
            at += busy + chance.uniform(0, 80)
        traces.append(RankTrace(rank, tuple(spans)))
    target.write_text(render(traces, title="Overlap: 2026-01-31_12-00-00"), encoding="utf-8")


def completions(target: Path) -> None:
    from nemo2.llm.side_by_side import side_by_side
    from nemo2.models.generate import Generation

    def one(text: str) -> Generation:
        return Generation(
            prompt="def main(", text=text, token_ids=list(range(9)), log_probs=[-0.3] * 9, finished=text[-1] == ":"
        )

    answers = {
        "step=1000": [one("self):\n    return None"), one("argv):")],
        "step=2000": [one("argv):"), one("argv):")],
    }
    target.write_text(side_by_side(answers, subtitle="temperature 0.0, seed 1234"), encoding="utf-8")


def notebook(target: Path) -> None:
    """Jupyter's output for a recipe, for one of its nodes, and for a Partial."""
    from nemo2 import llm
    from nemo2.config.html import html_tree

    recipe = llm.llama3_8b.pretrain_recipe()
    shown = (recipe, recipe.trainer.strategy, recipe.optim)
    target.write_text(bare("".join(f"<div class='output'>{html_tree(one)}</div>" for one in shown)), encoding="utf-8")


def figure(name: str, target: Path) -> None:
    from nemo2.report.pictures.svg import standalone

    target.write_text(bare(f"<div class='scroll'>{standalone(FIGURES[name]().render())}</div>"), encoding="utf-8")


def bare(body: str) -> str:
    """A page with nothing of ours around what a notebook or a site shows."""
    style = (
        ":root{color-scheme:light dark}body{margin:8px;background:#fff;color:#111}.scroll,.output{overflow-x:auto}"
        "@media(prefers-color-scheme:dark){body{background:#111;color:#eee}}"
    )
    head = f"<meta charset='utf-8'><title>{escape('shown')}</title><style>{style}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"


PAGES: dict[str, Callable[[Path], None]] = {
    "report": partial(report, steps=2000, stops=((731, 700), (1500, 1500))),
    "report_short": partial(report, steps=16, stops=()),
    "loss_curve": loss_curve,
    "compare": compared,
    "overlap": overlap,
    "completions": completions,
    "rehearse_fits": command("rehearse", "llama3_8b", "--html", "{}"),
    "rehearse_does_not_fit": command("rehearse", "llama3_70b", "--no-advice", "--html", "{}"),
    "plan": command("plan", "llama3_8b", "--gpus", "H100x64", "--search", "--html", "{}"),
    "layout": command("show", "llama3_70b", "--layout", "--gpus", "H100x1152", "--output", "{}"),
    "layout_experts": command("show", "deepseek_v3", "--layout", "--output", "{}"),
    "layout_small": command(
        "show", "llama_tiny", "--layout", "strategy.pipeline_model_parallel_size=2", "--devices", "4", "-o", "{}"
    ),
    "recipe": command("show", "llama3_8b", "--output", "{}"),
    "recipe_experts": command("show", "deepseek_v3", "--performance", "--output", "{}"),
    "notebook": notebook,
    **{f"figure_{name}": partial(figure, name) for name in FIGURES},
}
