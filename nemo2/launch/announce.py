# SPDX-License-Identifier: Apache-2.0
"""The lines around a run, for commands and for `launch` in Python: a block at its start with machine, model, output
directory and changed settings, and where its results are at its end."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from nemo2.base.columns import folded
from nemo2.base.counts import counted
from nemo2.base.errors import ConfigError
from nemo2.base.place import usable_cores
from nemo2.config.overrides import in_shell
from nemo2.data.mock import is_mock
from nemo2.launch.result import RunResult
from nemo2.launch.slurm.settings import ClusterSettings
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.world import world_of
from nemo2.preflight.planner.size import size_of
from nemo2.training.run_dir.directory import DEFAULT_BASE
from nemo2.training.run_dir.environment import redact_text


def print_start(
    recipe: Any,
    name: str,
    executor: Any,
    machine: Machine,
    settings: Optional[ClusterSettings] = None,
    *,
    changes: Sequence[str] = (),
) -> None:
    """Print on stderr what will run, with a line per fact. Nothing is printed about a recipe that can't run: the launch
    reports its mistakes.

    Args:
        recipe: The recipe with all changes, on its final nodes and devices.
        name: The title: the recipe's name on the command line, or the run's.
        executor: A cluster's profile or a nemo-run executor; None or "local": this machine.
        machine: The machine of the run.
        settings: The profile's, with the directory of runs whose recipe names no absolute one.
        changes: The changes of the command line to the recipe.
    """
    cluster = None if machine.local else executor if isinstance(executor, str) else type(executor).__name__
    with contextlib.suppress(ConfigError, AttributeError, TypeError):
        text = _block(recipe, name, cluster, machine, settings.runs if settings else "", changes)
        # The checks, which refuse a secret among the changes, come later.
        print(redact_text(text), file=sys.stderr, flush=True)


def print_end(result: RunResult) -> None:
    """Print where the results of a run are, or how to follow it."""
    run = result.experiment_id
    if result.jobs and result.status == "submitted":
        print(f"follow the run with `nemo2 runs tail {run}`, end it with `nemo2 runs cancel {run}`")
    elif result.status == "submitted":
        print(f"submitted as {run}; show its status with `nemo experiment status {run}`")
    elif result.run_dir is not None and result.status == "succeeded":
        print(f"run directory: {result.run_dir}")
        report = result.run_dir / "report.html"
        if report.is_file():
            print(f"report: {report}")


def _block(recipe: Any, name: str, executor: Optional[str], machine: Machine, runs: str, changes: Sequence[str]) -> str:
    world = world_of(recipe, machine)
    each = ("process", "processes") if machine.accelerator == "cpu" else ("GPU",)
    count = counted(world.size, *each)
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    kind = (
        machine.describe() + machine.lacking(world.devices)
        if executor is None
        else f"{executor} ({machine.describe()})"
    )
    cores = max(1, int(usable_cores()))
    if executor is None and machine.accelerator == "cpu" and (world.nodes > 1 or world.devices > cores):
        kind += f" (one node of {counted(cores, 'core')})"
    data, log = recipe.data, recipe.log
    base = log.log_dir or ("" if runs else DEFAULT_BASE)
    size, resume = size_of(recipe, machine), getattr(recipe, "resume", None)
    restored = getattr(getattr(resume, "restore_config", None), "path", "")
    validates, batches = recipe.__fn_or_cls__.__name__ == "validate", recipe.trainer.limit_val_batches
    facts = {
        "machine": f"{count}{nodes}, {kind}",
        "layout": Layout.of(recipe.trainer.strategy).describe(world.size),
        "parameters": "" if size is None else str(size),
        "starts from": str(restored or getattr(resume, "resume_from_path", "") or ""),
        "data": f"{data.__fn_or_cls__.__name__}{' (random tokens)' if is_mock(data) else ''}, sequences of "
        f"{data.seq_length:,} tokens, {data.global_batch_size:,} per step",
        "steps": f"{recipe.trainer.max_steps:,}" if (recipe.trainer.max_steps or 0) > 0 and not validates else "",
        "batches": str(batches) if validates and batches is not None else "",
        "writes to": str(Path(runs) / (log.explicit_log_dir or Path(base) / (log.name or "default"))),
        "changed": in_shell(changes),
    }
    return "\n".join([name, *(folded(f"  {fact:12}{value}", indent=14) for fact, value in facts.items() if value)])
