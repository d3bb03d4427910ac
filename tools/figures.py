# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documentation into docs/figures: `make figures`; `python -m tools.figures --check` compares them.

They come from Megatron-Core's rank generator, layer helpers and schedule tables, like `nemo2 show --layout`; those that explain a
parallelism (`tools/explained`) also from its layers, torch's and ours, run on one rank of a silent world.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from nemo2.report.pictures.svg import Canvas, standalone
from tools.explained import buckets, context, data, journey, mixing, pipeline, placed, sharded, tensor, userbuffers
from tools.explained import experts as expert_parallel

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"


FIGURES: dict[str, Callable[[], Canvas]] = {
    "journey": journey.journey,
    "ddp": data.ddp,
    "zero1": data.zero1,
    "fsdp": sharded.fsdp,
    "tp_mlp": tensor.mlp,
    "tp_heads": tensor.heads,
    "sp": tensor.sequence,
    "cp_chunks": context.chunks,
    "cp_ring": context.ring,
    "cp_ways": context.ways,
    "ep": expert_parallel.experts,
    "pp": pipeline.travel,
    "interleaving": pipeline.interleaving,
    "mixing": mixing.small,
    "mixing_recipe": mixing.recipe,
    "tp_overlap": userbuffers.methods,
    "pp_overlap": pipeline.overlap,
    "dp_overlap": buckets.overlap,
    "schedules": pipeline.schedules,
    "uneven": pipeline.uneven,
    "ranks": placed.layers,
    "experts": placed.experts,
}


def stale() -> list[str]:
    """The figures whose file isn't what this program draws."""
    old = []
    for name, draw in FIGURES.items():
        path = FOLDER / f"{name}.svg"
        if not path.is_file() or path.read_text(encoding="utf-8") != standalone(draw().render()):
            old.append(path.name)
    return old


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a figure is not current")
    if parser.parse_args().check:
        if old := stale():
            print(f"not current: {', '.join(old)}; run make figures", file=sys.stderr)
        return int(bool(old))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(standalone(draw().render()), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
