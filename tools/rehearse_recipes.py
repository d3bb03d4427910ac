# SPDX-License-Identifier: Apache-2.0
"""Rehearse every recipe that ships at the scale it declares: `make rehearse`.

Two processes share the recipes, largest first. Prints a line for each as it comes; `--write PAGE` also writes the table.
Ends with 1 if a recipe could not be rehearsed. Whether it fits its GPUs is a result, not a failure.
"""

import argparse
import gc
import importlib.metadata
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="Recipes; none means all.")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help="A Markdown page for the table.")
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows, failures = [], []
    context = multiprocessing.get_context("forkserver")
    with context.Pool(arguments.processes, initializer=_start) as pool:
        jobs = [(name, arguments.gpu) for name in arguments.names or _largest_first()]
        for name, row, error in pool.imap_unordered(_rehearse, jobs):
            if error:
                failures.append(name)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            else:
                rows.append(row)
                print("  ".join(row.values()), flush=True)
    seconds = time.perf_counter() - started
    print(f"{len(rows)} recipes rehearsed, {len(failures)} not, in {seconds:.0f} s")
    if arguments.write and rows:
        arguments.write.write_text(_page(sorted(rows, key=lambda row: row["recipe"]), arguments.gpu, seconds))
    return 1 if failures else 0


def _largest_first() -> list[str]:
    from nemo2 import recipes

    return sorted(recipes.names(), key=lambda name: -(getattr(recipes.get(name).RECIPE, "parameters", 0) or 0))


def _start() -> None:
    warnings.filterwarnings("ignore")
    # Imports leave no garbage, and looking for it among them takes seconds.
    gc.set_threshold(1_000_000)


def _rehearse(job: tuple[str, str]) -> tuple[str, dict[str, str], str]:
    name, gpu = job
    try:
        from nemo2.cli.inspection import configured
        from nemo2.rehearse.job import rehearse

        result = rehearse(configured(name, []), name=name, gpus=gpu, advice=False)
    except Exception:
        return name, {}, traceback.format_exc()
    fullest = max(result.ranks, key=lambda rank: rank.memory.total)
    verdict = result.verdict
    row = {
        "recipe": name,
        "GPUs": str(result.num_gpus),
        "layout": result.layout,
        "state GiB": f"{fullest.memory.state / GIB:.1f}",
        "activations GiB": f"{(sum(fullest.memory.activations.values()) + fullest.memory.logits) / GIB:.1f}",
        "needed GiB": f"{verdict.needed / GIB:.1f}",
        "fullest": verdict.fullest,
        "fits": "yes" if verdict.fits else "no",
        "seconds": f"{result.seconds:.1f}",
    }
    return name, row, ""


def _page(rows: list[dict[str, str]], gpu: str, seconds: float) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("megatron-core", "torch"))
    head = list(rows[0])
    lines = [
        "# Every recipe, rehearsed",
        "",
        f"`make rehearse` on {date.today()}, {versions}, GPU {gpu}: {len(rows)} recipes in {seconds:.0f} s.",
        "What the columns mean and what is taken for granted: [Rehearsing a job](rehearse.md). A recipe that does not fit says",
        "so; `nemo2 rehearse NAME` looks for the smallest change.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row.values()) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
