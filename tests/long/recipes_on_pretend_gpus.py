# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe, shrunk, on pretend GPUs: `make nightly`.

    python -m support.pretend_gpu --gpus 4 python -m tests.long.recipes_on_pretend_gpus --write bench/results/pretend-gpu.md

A recipe is built, trains three steps, validates and saves. Copies of the run go on for a step from the same weights and
optimizer, on pretend GPUs in another layout and on CPUs, so that their losses can be compared, and its checkpoint is exported.
Fine-tuning starts from a run of all its parameters. The first recipe of each family comes before the second, so that a call which
`--seconds` ends has run all families it could. A row that is done is kept, and not run again by the next call without `--again`.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support import ranks
from support.pretend_gpu import HOME, runs

TOLERANCE = 2e-3
"""Between losses of the same step, in bf16: 8 bits of a number."""
_BASES = threading.Lock()
"""Held where a run is made that fine-tunings start from: two may start from the same."""
WITH_TE = find_spec("transformer_engine") is not None
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="Recipes; none means all.")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--again", action="store_true", help="Run rows anew that are done.")
    parser.add_argument("--seconds", type=float, help="Start no recipe after so many seconds.")
    parser.add_argument("--timeout", type=float, default=180.0, help="Seconds that one run may take.")
    parser.add_argument("--write", type=Path, help="A Markdown page for the table.")
    arguments = parser.parse_args()
    if os.environ.get("PRETEND_GPU") != "1":
        parser.error(
            "start it by python -m support.pretend_gpu --gpus 4: without pretend GPUs all runs would be on CPUs"
        )
    ranks.prepare(*PRELOAD, *(["megatron.core.extensions.transformer_engine"] if WITH_TE else []))
    for module in PRELOAD:  # here, because two threads that import Megatron-Core at once find it half imported
        import_module(module)
    kept = HOME / "recipes"
    if arguments.again:
        shutil.rmtree(kept / "bases", ignore_errors=True)
    (kept / "bases").mkdir(parents=True, exist_ok=True)
    ends = None if arguments.seconds is None else time.monotonic() + arguments.seconds

    def row(case: tuple[str, str]) -> dict[str, Any] | None:
        path = kept / f"{'.'.join(case)}.json"
        if not arguments.again and path.is_file() and "error" not in (stored := json.loads(path.read_text())):
            return stored
        if ends is not None and time.monotonic() > ends:
            return None
        found = measure(*case, bases=kept / "bases", timeout=arguments.timeout)
        path.write_text(json.dumps(found))
        print(found["recipe"], found["kind"], found.get("error") or found["verdict"], flush=True)
        return found

    wanted = cases(arguments.names, arguments.kinds)
    with ThreadPoolExecutor(2) as workers:  # which wait for ranks
        rows = [found for found in workers.map(row, wanted) if found]
    if arguments.write:
        arguments.write.write_text(page(rows, wanted=len(wanted)))
    return 1 if any("error" in found or found["verdict"] != "same" for found in rows) else 0


def cases(names: list[str], kinds: list[str]) -> list[tuple[str, str]]:
    """The rows, by recipe and kind: those of each family's first recipe before those of the second."""
    from nemo2 import recipes

    modules: dict[str, Any] = {name: recipes.get(name) for name in names or recipes.names()}
    families: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for name, module in modules.items():
        turns[name] = families[module.RECIPE.family]
        families[module.RECIPE.family] += 1
    rows = [
        (name, kind)
        for kind in kinds
        for name, module in modules.items()
        if hasattr(module, "finetune_recipe" if "scheme" in KINDS[kind] else "pretrain_recipe")
        and (kind != "performance" or module.RECIPE.performance is not None)
    ]
    return sorted(rows, key=lambda row: turns[row[0]])


def measure(name: str, kind: str, *, bases: Path, timeout: float) -> dict[str, Any]:
    """One row of the table."""
    options = dict(KINDS[kind])
    found: dict[str, Any] = {"recipe": name, "kind": kind}
    folder = Path(tempfile.mkdtemp(prefix="pretend-gpu-"))
    started = time.monotonic()

    def on_ranks(function: Callable[..., Any], world: int, *arguments: Any, **more: Any) -> Any:
        return ranks.run(function, world, *arguments, init_process_group=False, quiet=True, timeout=timeout, **more)[0]

    try:
        small = runs.shrunk(name, **options)
        found |= {"gpus": small.processes, "notes": list(small.notes)}
        if "scheme" in options:  # of the same number of layers as the fine-tuning, which its layout decides
            base = bases / f"{name}-{small.recipe.model.config.num_layers}"
            with _BASES:
                if not base.is_dir():
                    on_ranks(runs.train, small.processes, str(folder / "base"), name, **options)
                    shutil.move(folder / "base", base)
            options["base"] = str(runs.checkpoint_of(str(base)))
        found |= on_ranks(runs.train, small.processes, str(folder / "gpu"), name, **options)
        found["layout"] = runs.other_layout(small)
        # Without a GPU Transformer Engine's torch may be too old for several ranks, and is enough for one.
        alone = {"overrides": runs.ALONE} if WITH_TE else {}
        for where, more in {
            "gpu": {"overrides": found["layout"]},
            "cpu": {"env": runs.CPU, "transformer_engine": False, **alone},
        }.items():
            shutil.copytree(folder / "gpu", folder / f"next_on_{where}")
            run, world = str(folder / f"next_on_{where}"), 1 if where == "cpu" and alone else small.processes
            again = on_ranks(runs.train, world, run, name, steps=runs.STEPS + 1, **options, **more)
            [found[f"next_on_{where}"]] = again["losses"]
        adapters = options.get("scheme") in ("lora", "dora")
        written = str(folder / "hf")
        found["export"] = on_ranks(runs.exported, 1, str(folder / "gpu"), written, env=runs.CPU, adapters=adapters)
        difference = abs(found["next_on_gpu"] / found["next_on_cpu"] - 1)
        found |= {"difference": difference, "verdict": "same" if difference <= TOLERANCE else "differs"}
    except Exception as error:  # whatever it is belongs to this row; the others still run
        text = str(error)
        found |= {"error": re.sub(r"(/[^\s/]+)+/", "", text.partition("\n")[0]), "trace": text}
    finally:
        shutil.rmtree(folder)
    return found | {"seconds": round(time.monotonic() - started, 1)}


def page(rows: list[dict[str, Any]], *, wanted: int) -> str:
    """The table as Markdown. ``wanted``: how many rows it would have if none were missing."""
    done = [row for row in rows if "error" not in row]
    same = sum(row["verdict"] == "same" for row in done)
    te = f"Transformer Engine {version('transformer_engine')}" if WITH_TE else "without Transformer Engine"
    exported = sum(not row["export"].startswith("refused") for row in done)
    lines = [
        "# Shrunk recipes on pretend GPUs",
        "",
        f"{date.today():%d %B %Y}, Python {sys.version_info.major}.{sys.version_info.minor}, torch {version('torch')}, "
        f"Megatron-Core {version('megatron-core')}, {te}. Made by `python -m tests.long.recipes_on_pretend_gpus`.",
        "",
        f"{len(rows)} of {wanted} runs, of {len({row['recipe'] for row in rows})} recipes: {len(done)} trained "
        f"{runs.STEPS} steps, validated, saved and went on; {same} of these went on in another layout to the same loss as on "
        f"CPUs, within {TOLERANCE:g}; {exported} were exported.",
        "",
        "| kind | runs | same loss | another loss | ended with an error | exported |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        verdicts = [row.get("verdict", "error") for row in own]
        written = sum("export" in row and not row["export"].startswith("refused") for row in own)
        counts = (len(own), *(verdicts.count(verdict) for verdict in ("same", "differs", "error")), written)
        lines.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    lines += [
        "",
        "| recipe | kind | GPUs | losses | validation | next on GPUs | next on CPUs | difference | exported as |",
        "|---|---|--:|---|--:|--:|--:|--:|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["recipe"], list(KINDS).index(row["kind"]))):
        start = f"| `{row['recipe']}` | {row['kind']} | {row.get('gpus', '')} |"
        if "error" in row:
            lines.append(f"{start} {' '.join(row['error'].split()).replace('|', '/')[:160]} | | | | | |")
        else:
            losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            lines.append(
                f"{start} {losses} | {row['validation'][-1]:.4f} | {row['next_on_gpu']:.4f} | {row['next_on_cpu']:.4f} | "
                f"{row['difference']:.1e} | {row['export'].partition(':')[0]} |"
            )
    notes = sorted({note for row in rows for note in row.get("notes", ())})
    return "\n".join([*lines, "", "What shrinking left out of some:", "", *(f"- {note}" for note in notes)]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
