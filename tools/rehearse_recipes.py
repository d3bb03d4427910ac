# SPDX-License-Identifier: Apache-2.0
"""Check and rehearse every recipe that ships, of pre-training and of fine-tuning (by LoRA, and all parameters), at the scale it
declares: `make rehearse`.

Two processes, forked after the imports, share the recipes, largest first. Prints a line for each as it comes; `--write PAGE`
also writes the table, and the memory that answers are read from (`nemo2.preflight.planner.peaks`); with names, only
their rows. Ends with 1 if a recipe broke a rule or could not be rehearsed.
Whether a recipe fits its GPUs is a result, not a failure.
"""

import argparse
import gc
import importlib.metadata
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

GIB = 2**30
PROCESSES = 2
LAST_RUN = "All recipes were last rehearsed on"
"""The start of the line that stays when only some recipes are rehearsed."""
_LEFT_OUT = {"llama_tiny:lora", "llama_tiny:full"}
"""Recipes whose vocabulary comes from the run that they continue, which the user names."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="Recipes, such as llama3_8b or llama3_8b:lora; none means all.")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--write", type=Path, help="A Markdown page for the table.")
    arguments = parser.parse_args()
    started = time.perf_counter()
    _import()
    rows, failures, peaks = [], [], {}
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        jobs = [(name, arguments.gpu) for name in arguments.names or _largest_first()]
        for name, row, peak, error in pool.imap_unordered(rehearse_one, jobs):
            if error:
                failures.append(name)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            else:
                rows.append(row)
                peaks[name] = peak
                print("  ".join(row.values()), flush=True)
        pool.close()
        pool.join()
    seconds, processor = time.perf_counter() - started, _processor_seconds() / arguments.processes
    print(
        f"{len(rows)} recipes rehearsed, {len(failures)} not, in {seconds:.0f} s; {processor:.0f} s of processor time on each "
        f"of {arguments.processes} cores"
    )
    if arguments.write and rows:
        from nemo2.preflight.planner.peaks import FILE

        if arguments.names:
            rows = [*(row for row in rows_of(arguments.write) if row["recipe"] not in peaks), *rows]
            peaks = json.loads(FILE.read_text()) | peaks
        rows.sort(key=lambda row: row["recipe"])
        if arguments.names:
            lines = arguments.write.read_text().splitlines()
            last_run = next(line for line in lines if line.startswith(LAST_RUN))
        else:
            last_run = described(processor, arguments.processes)
        arguments.write.write_text(table(rows, arguments.gpu, last_run))
        lines = (f"  {json.dumps(name)}: {json.dumps(peaks[name])}" for name in sorted(peaks))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 1 if failures else 0


def _import() -> None:
    """Imports that every recipe needs, once, before there are processes to share them."""
    warnings.filterwarnings("ignore")
    # Imports leave no garbage, and looking for it among them takes seconds.
    gc.set_threshold(1_000_000)
    import nemo2.cli.sources
    import nemo2.llm.api
    import nemo2.preflight.rehearse.job
    import nemo2.training.trainer  # noqa: F401

    gc.freeze()


def _processor_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _largest_first() -> list[str]:
    from nemo2 import recipes

    sizes = {name: getattr(recipes.get(name).RECIPE, "parameters", 0) or 0 for name in recipes.names()}
    variants = {
        f"{name}{method}": size
        for name, size in sizes.items()
        for method in ("", ":lora", ":full")
        if not method or hasattr(recipes.get(name), "finetune_recipe")
    }
    return sorted(variants.keys() - _LEFT_OUT, key=lambda name: (-variants[name], name))


def rehearse_one(job: tuple[str, str]) -> tuple[str, dict[str, str], dict[str, Any], str]:
    """The recipe's name, its row of the table, its entry of `nemo2.preflight.planner.peaks`, and a traceback if the
    rehearsal failed. `job` is (name, GPU)."""
    name, gpu = job
    before = time.process_time()
    try:
        from nemo2.cli.sources import configured
        from nemo2.preflight.planner.fit import key_of
        from nemo2.preflight.rehearse.job import rehearse

        recipe = configured(name, [])
        result = rehearse(recipe, name=name, gpus=gpu, advice=False)
    except Exception:
        return name, {}, {}, traceback.format_exc()
    fullest = max(result.ranks, key=lambda rank: rank.memory.total)
    verdict = result.verdict
    row = {
        "recipe": name,
        "GPUs": str(result.num_gpus),
        "layout": result.layout,
        "verdict": verdict.answer,
        "peak GiB": f"{verdict.needed / GIB:.1f}",
        "largest term": verdict.largest_term,
        "model state GiB": f"{fullest.memory.state / GIB:.1f}",
        "fullest": verdict.fullest,
        "seconds": f"{time.process_time() - before:.1f}",
    }
    return name, row, {"key": key_of(recipe), "ranks": verdict.ranks}, ""


def rows_of(page: Path) -> list[dict[str, str]]:
    """The rows of a page that `table` wrote."""
    head, _, *rows = (
        [*map(str.strip, line.split("|")[1:-1])] for line in page.read_text().splitlines() if line[:1] == "|"
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


def described(processor: float, processes: int) -> str:
    """The line about a rehearsal of all recipes; ``processor``: seconds of it in each of the processes."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("megatron-core", "torch"))
    return (
        f"{LAST_RUN} {date.today()}, with {versions}: {processor:.0f} s of processor time on each of {processes} cores."
    )


def table(rows: list[dict[str, str]], gpu: str, last_run: str) -> str:
    """The rows as a Markdown page. ``last_run``: see `described`."""
    head = list(rows[0])
    fit = sum(row["verdict"] == "fits" for row in rows)
    lines = [
        "# Every recipe, rehearsed",
        "",
        "<!-- Written by `make rehearse`. -->",
        "",
        "This page shows whether each shipped recipe fits its GPUs, and how much memory it needs. A suffix names the variant:",
        "`:lora` and `:full` are fine-tuning by LoRA and of all parameters.",
        "",
        "The peak is the memory of one GPU of the fullest kind of rank, with 2 GiB for memory outside of torch. A recipe fits",
        "if 5% of the GPU stays free, and is tight with less. If a recipe doesn't fit, `nemo2 rehearse NAME` looks for the",
        "smallest change that makes it fit. [Rehearse a job](rehearse.md) explains what is counted, and the assumptions.",
        "",
        f"The table has {len(rows)} recipes, each on as many {gpu}s as it declares. {fit} of them fit. The last column is the",
        "processor time of one recipe.",
        last_run,
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row.values()) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
