# SPDX-License-Identifier: Apache-2.0
"""Profiles two steps of the smallest case and prints what share of them the device computes, and what it hides: python -m
bench.gpu.profile."""

import argparse
import tempfile
from pathlib import Path

from bench.gpu.cases import Case, recipe_of, small
from bench.gpu.worker import start_alone

CASE = Case(recipe="llama32_1b", layers=None, seq=4096)
STEPS, FIRST = 8, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a size for a CPU: says that it runs")
    arguments = parser.parse_args()
    start_alone()

    import fiddle as fdl

    from nemo2.callbacks import PytorchProfilerCallback
    from nemo2.report.trace.events import length
    from nemo2.report.trace.report import text, traces_of

    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(small(CASE) if arguments.toy else CASE, steps=STEPS)
        recipe.log.log_dir = folder
        profiler = fdl.Config(
            PytorchProfilerCallback,
            start_step=FIRST - 1,
            end_step=STEPS - 1,
            warmup_steps=1,
            active_steps=2,
            trace_dir=folder,
        )
        recipe.trainer.callbacks.append(profiler)
        fdl.build(recipe)()
        traces = traces_of(Path(folder))
        for trace in traces:
            print(
                f"The device computes in {length(trace.busy) / max(trace.end - trace.start, 1e-9):.1%} of the traced time."
            )
        print(text(traces))


if __name__ == "__main__":
    main()
