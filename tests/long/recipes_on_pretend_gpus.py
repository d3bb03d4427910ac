# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe, shrunk, on pretend GPUs: `make nightly`.

    python -m support.pretend_gpu --gpus 4 python -m tests.long.recipes_on_pretend_gpus --write bench/results/pretend-gpu.md

A recipe is built, trains three steps, validates and saves. Copies of the run go on for a step from the same weights and
optimizer, on pretend GPUs in another layout and on CPUs, so that their losses can be compared, and its checkpoint is exported.
Fine-tuning starts from the pre-training's weights, or where those have another number of layers from a run of all parameters.

Rows whose shrunk recipes are the same but for names and paths are one run. Runs that are done stand in one file by the digest
of their recipe, from which the next call goes on: a recipe that changed is run anew. The first recipe of each family comes
before the second, so that a call which `--seconds` ends has run all families it could.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support import ranks
from support.pretend_gpu import HOME, runs

TOLERANCE = 2e-3
"""Between losses of the same step, in bf16: 8 bits of a number."""
WITH_TE = find_spec("transformer_engine") is not None
RESULTS = ranks.ROOT / "bench" / "results" / "pretend-gpu-recipes.json"
PRELOAD = (
    "nemo2.preflight.checks",
    "nemo2.data",
    "nemo2.data.mock",
    "nemo2.preflight.rehearse.shrink",
    "support.small_runs",
)
KINDS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "performance": {"performance": True},
    "lora": {"scheme": "lora"},
    "full": {"scheme": "full"},
    "dora": {"scheme": "dora"},
}


@dataclass
class Run:
    """A shrunk recipe that is trained once, and the rows of the table that it stands for."""

    name: str
    kind: str
    small: Any
    rows: list[tuple[str, str]] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="Recipes; none means all.")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--again", action="store_true", help="Run anew what is done.")
    parser.add_argument("--seconds", type=float, help="Start no run after so many seconds.")
    parser.add_argument("--timeout", type=float, default=180.0, help="Seconds that one stage of a run may take.")
    parser.add_argument("--at-once", type=int, default=2, help="Recipes whose runs go on at the same time.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="The file of runs that are done.")
    parser.add_argument("--write", type=Path, help="A Markdown page for the table.")
    arguments = parser.parse_args()
    if os.environ.get("PRETEND_GPU") != "1":
        parser.error(
            "start it by python -m support.pretend_gpu --gpus 4: without pretend GPUs all runs would be on CPUs"
        )
    families = [f"nemo2.models.{path.stem}" for path in sorted((ranks.ROOT / "nemo2" / "models").glob("[a-z]*.py"))]
    ranks.prepare(*PRELOAD, *families, *(["megatron.core.extensions.transformer_engine"] if WITH_TE else []))
    for module in PRELOAD:  # here, because two threads that import Megatron-Core at once find it half imported
        import_module(module)
    planned = plan(arguments.names, arguments.kinds)
    results = Results(arguments.results)
    bases = HOME / "recipes" / "bases"
    if arguments.again:
        shutil.rmtree(bases, ignore_errors=True)
    bases.mkdir(parents=True, exist_ok=True)
    ends = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    wanted: dict[str, list[str]] = defaultdict(list)
    for digest, run in planned.items():
        if arguments.again or "error" in results.stored.get(digest, {"error": ""}):
            wanted[run.name].append(digest)

    def run_recipe(digests: list[str]) -> None:
        for digest in digests:
            if ends is None or time.monotonic() < ends:
                results.add(digest, measure(planned[digest], bases=bases, timeout=arguments.timeout))

    with ThreadPoolExecutor(arguments.at_once) as workers:  # which wait for ranks
        list(workers.map(run_recipe, wanted.values()))
    if arguments.write:
        arguments.write.write_text(page(planned, results.stored))
    done = [results.stored[digest] for digest in planned if digest in results.stored]
    return 1 if any("error" in result or result["verdict"] != "same" for result in done) else 0


class Results:
    """Results of runs by digest, in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
        self._lock = threading.Lock()

    def add(self, digest: str, result: dict[str, Any]) -> None:
        print(result["recipe"], result["kind"], result.get("error") or result["verdict"], flush=True)
        with self._lock:
            self.stored[digest] = result
            lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self.stored.items()))
            new = self.path.with_suffix(".new")
            new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            new.replace(self.path)


def plan(names: list[str], kinds: list[str]) -> dict[str, Run]:
    """The runs by digest: all kinds of a family's first recipe before those of its second."""
    from nemo2 import recipes

    modules: dict[str, Any] = {name: recipes.get(name) for name in names or recipes.names()}
    families: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for name, module in modules.items():
        turns[name] = families[module.RECIPE.family]
        families[module.RECIPE.family] += 1
    planned: dict[str, Run] = {}
    for name in sorted(modules, key=lambda name: turns[name]):
        for kind in kinds:
            if not hasattr(modules[name], "finetune_recipe" if "scheme" in KINDS[kind] else "pretrain_recipe"):
                continue
            if kind == "performance" and modules[name].RECIPE.performance is None:
                continue
            small = runs.shrunk(name, **KINDS[kind])
            run = planned.setdefault(runs.digest(small), Run(name, kind, small))
            run.rows.append((name, kind))
    return planned


def measure(run: Run, *, bases: Path, timeout: float) -> dict[str, Any]:
    """One run of the table, and where its weights are to start a fine-tuning from, ``bases``."""
    name, small, options = run.name, run.small, dict(KINDS[run.kind])
    result: dict[str, Any] = {"recipe": name, "kind": run.kind, "gpus": small.processes, "notes": list(small.notes)}
    folder = Path(tempfile.mkdtemp(prefix="pretend-gpu-"))
    started, spent = time.monotonic(), ranks.cpu_seconds()

    def on_ranks(function: Callable[..., Any], world: int, *arguments: Any, **more: Any) -> Any:
        return ranks.run(function, world, *arguments, init_process_group=False, quiet=True, timeout=timeout, **more)[0]

    base = bases / f"{name}-{small.recipe.model.config.num_layers}{'-te' if WITH_TE else ''}"
    try:
        if "scheme" in options:
            if not base.is_dir():
                on_ranks(runs.train, small.processes, str(folder / "base"), name, **options)
                shutil.move(folder / "base", base)
            options["base"] = str(runs.checkpoint_of(str(base)))
        result |= on_ranks(runs.train, small.processes, str(folder / "gpu"), name, **options)
        if run.kind == "pretrain":
            shutil.rmtree(base, ignore_errors=True)
            shutil.copytree(folder / "gpu", base)
        result["layout"] = runs.other_layout(small)
        # Without a GPU Transformer Engine's torch may be too old for several ranks, and is enough for one.
        alone = {"overrides": runs.ALONE} if WITH_TE else {}
        for where, more in {
            "gpu": {"overrides": result["layout"]},
            "cpu": {"env": runs.CPU, "transformer_engine": False, **alone},
        }.items():
            shutil.copytree(folder / "gpu", folder / f"next_on_{where}")
            copy, world = str(folder / f"next_on_{where}"), 1 if where == "cpu" and alone else small.processes
            again = on_ranks(runs.train, world, copy, name, steps=runs.STEPS + 1, **options, **more)
            [result[f"next_on_{where}"]] = again["losses"]
        adapters = options.get("scheme") in ("lora", "dora")
        written = str(folder / "hf")
        result["export"] = on_ranks(runs.exported, 1, str(folder / "gpu"), written, env=runs.CPU, adapters=adapters)
        difference = abs(result["next_on_gpu"] / result["next_on_cpu"] - 1)
        result |= {"difference": difference, "verdict": "same" if difference <= TOLERANCE else "differs"}
    except Exception as error:  # whatever it is belongs to this run; the others still go on
        text = str(error)
        result["error"] = re.sub(r"(/[^\s/]+)+/", "", " ".join(text.partition("\n")[0].split()))
        traces = HOME / "recipes" / "errors"
        traces.mkdir(exist_ok=True)
        (traces / f"{name}.{run.kind}.txt").write_text(text)
    finally:
        shutil.rmtree(folder)
    return result | {
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(ranks.cpu_seconds() - spent, 1),
        "versions": versions(),
    }


def versions() -> str:
    """What a run ran with: this project's commit and the packages that decide about its numbers."""
    command = ["git", "-C", str(ranks.ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or version("nemo2")
    packages = ["torch", "megatron-core", *(["transformer_engine"] if WITH_TE else [])]
    return ", ".join([f"nemo2 {commit}", *(f"{package} {version(package)}" for package in packages)])


def page(planned: dict[str, Run], stored: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown."""
    results = [(run, stored[digest]) for digest, run in planned.items() if digest in stored]
    done = [(run, result) for run, result in results if "error" not in result]

    def rows(some: list[tuple[Run, Any]], kind: str | None = None) -> int:
        return sum(kind in (None, own) for run, _ in some for _, own in run.rows)

    wanted = sum(len(run.rows) for run in planned.values())
    same = [(run, result) for run, result in done if result["verdict"] == "same"]
    differing = [(run, result) for run, result in done if result["verdict"] != "same"]
    failed = [(run, result) for run, result in results if "error" in result]
    exported = [(run, result) for run, result in done if not result["export"].startswith("refused")]
    spent = sum(result["processor_seconds"] for _, result in done) / max(len(done), 1)
    lines = [
        "# Shrunk recipes on pretend GPUs",
        "",
        f"Python {sys.version_info.major}.{sys.version_info.minor}. Made by `python -m tests.long.recipes_on_pretend_gpus`. A "
        "letter says what a run ran with:",
        "",
    ]
    letters = {
        text: chr(97 + index) for index, text in enumerate(sorted({result["versions"] for _, result in results}))
    }
    lines += [
        *(f"- {letter}: {text}" for text, letter in letters.items()),
        "",
        f"The {wanted} rows, a recipe and a kind each, are {len(planned)} different runs: sizes of a family that shrink to "
        f"the same recipe are trained once. {len(results)} runs, {rows(results)} rows, are done. {rows(done)} rows trained "
        f"{runs.STEPS} steps, validated, saved and went on; {rows(same)} of these went on in another layout to the same loss as "
        f"on CPUs, within {TOLERANCE:g}; {rows(exported)} were exported. A run took {spent:.0f} s of processor time.",
        "",
        "| kind | rows | done | same loss | another loss | ended with an error | exported |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        total = sum(own == kind for run in planned.values() for _, own in run.rows)
        counts = (total, *(rows(some, kind) for some in (results, same, differing, failed, exported)))
        lines.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    lines += [
        "",
        "| recipe | kind | with | GPUs | losses | validation | next on GPUs | next on CPUs | difference | exported as |",
        "|---|---|---|--:|---|--:|--:|--:|--:|---|",
    ]
    for run, result in sorted(results, key=lambda pair: (pair[0].name, list(KINDS).index(pair[0].kind))):
        names = "<br>".join(f"`{name}`" + ("" if kind == run.kind else f" ({kind})") for name, kind in run.rows)
        start = f"| {names} | {run.kind} | {letters[result['versions']]} | {result['gpus']} |"
        if "error" in result:
            lines.append(f"{start} {result['error'].replace('|', '/')[:160]} | | | | | |")
        else:
            losses = ", ".join(f"{loss:.4f}" for loss in result["losses"])
            lines.append(
                f"{start} {losses} | {result['validation'][-1]:.4f} | {result['next_on_gpu']:.4f} | "
                f"{result['next_on_cpu']:.4f} | {result['difference']:.1e} | {result['export'].partition(':')[0]} |"
            )
    notes = sorted({note for _, result in results for note in result["notes"]})
    return "\n".join([*lines, "", "What shrinking left out of some:", "", *(f"- {note}" for note in notes)]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
