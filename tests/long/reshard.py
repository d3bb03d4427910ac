# SPDX-License-Identifier: Apache-2.0
"""`make reshard`: checkpoints saved in one layout and loaded in another, every pair of `resharding.PAIRS`.

Prints a line per pair and exits non-zero if one doesn't hold. ``--only TEXT`` runs the pairs whose name contains it,
``--skip N`` leaves out the first N of these, ``--output FILE`` writes the table as Markdown.
"""

import argparse
import datetime
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from support import ranks, resharding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only pairs whose name contains this")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out the first N pairs: go on with an interrupted run"
    )
    parser.add_argument("--output", type=Path, help="write the table there")
    options = parser.parse_args()
    pairs = [pair for pair in resharding.PAIRS if options.only in str(pair)][options.skip :]
    if not pairs:
        parser.error("no pair is left")
    ranks.prepare("support.quiet")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = run(pairs, Path(folder))
    good = sum(line.endswith("ok |") for line in lines)
    summary = f"{good} of {len(pairs)} pairs hold, in {time.monotonic() - started:.0f} s"
    print(f"\n{summary}")
    if options.output is not None:
        options.output.write_text(table(lines, summary))
    raise SystemExit(0 if good == len(pairs) else 1)


def run(pairs: list[resharding.Pair], folder: Path) -> list[str]:
    sources: dict[tuple, list[float]] = {}
    lines = []
    for number, pair in enumerate(pairs):
        directory = folder / f"source-{'-'.join(map(str, pair.source))}".replace(" ", "_")
        again = folder / f"again{number}"
        try:
            if pair.source not in sources:
                sources[pair.source] = ranks.run(
                    resharding.save, pair.saved.world, *pair.source, str(directory), quiet=True
                )[0]
            losses = ranks.run(
                resharding.load,
                pair.loaded.world,
                pair.loaded,
                pair.moe,
                pair.exact,
                str(directory),
                str(again),
                quiet=True,
            )[0]
            outcome = resharding.compare(pair, str(directory), str(again), sources[pair.source], losses)
        except ranks.RankFailed as error:
            print(error)
            lines.append(f"| {pair} | | | | failed |")
        else:
            for name in outcome.different[:5]:
                print(f"  different: {name}")
            lines.append(
                f"| {pair} | {outcome.parameters} | {outcome.moments} | {outcome.loss:.1e} | "
                f"{'ok' if outcome.good else 'differs'} |"
            )
        print(lines[-1], flush=True)
    return lines


def table(lines: list[str], summary: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "torch", "lightning"))
    head = [
        "# Checkpoints across layouts",
        "",
        f"`make reshard`, {datetime.date.today()}: {summary}. Python {platform.python_version()}, {versions}; CPU, gloo, fp32.",
        "",
        "Parameters and moments: how many tensors are equal to the last bit. Loss: the largest relative difference from the "
        "uninterrupted run over the ten steps after the load; with dropout, in the same layout, it has to be 0.",
        "",
        "| saved -> loaded | parameters | moments | loss | |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines, ""])


if __name__ == "__main__":
    main()
