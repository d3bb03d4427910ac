# SPDX-License-Identifier: Apache-2.0
"""The block printed at the start of a run: machine, model, output directory and changed settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from nemo2.settle.machine import Machine


def start_block(
    recipe: Any,
    name: str,
    machine: "Machine",
    *,
    changes: Sequence[str] = (),
    executor: Optional[str] = None,
    runs: str = "",
) -> str:
    """The text of the block, with a line per fact.

    Args:
        recipe: The recipe with all changes, on its final nodes and devices.
        name: The recipe's name on the command line.
        machine: The machine of the run.
        changes: The changes of the command line to the recipe.
        executor: The cluster's profile; None: this machine.
        runs: The profile's directory for runs whose recipe names no absolute directory.
    """
    from nemo2.cli.recipe_list import counted_parameters, short_count
    from nemo2.config.overrides import in_shell
    from nemo2.parallel.layout import Layout
    from nemo2.run_dir.directory import DEFAULT_BASE
    from nemo2.run_dir.environment import redact_text
    from nemo2.settle.world import world_of

    world = world_of(recipe, machine)
    each = "process" if machine.accelerator == "cpu" else "GPU"
    count = f"{world.size:,} {each}{'' if world.size == 1 else 'es' if each == 'process' else 's'}"
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    kind = (
        machine.describe() + machine.lacking(world.devices)
        if executor is None
        else f"{executor} ({machine.describe()})"
    )
    data, log = recipe.data, recipe.log
    base = log.log_dir or ("" if runs else DEFAULT_BASE)
    parameters = counted_parameters(recipe) or _by_tokenizer(recipe, machine)
    validates, batches = recipe.__fn_or_cls__.__name__ == "validate", recipe.trainer.limit_val_batches
    facts = {
        "machine": f"{count}{nodes}, {kind}",
        "layout": Layout.of(recipe.trainer.strategy).describe(world.size),
        "parameters": "" if parameters is None else short_count(parameters),
        "data": f"{data.__fn_or_cls__.__name__}, sequences of {data.seq_length:,} tokens, {data.global_batch_size:,} per step",
        "steps": f"{recipe.trainer.max_steps:,}" if (recipe.trainer.max_steps or 0) > 0 and not validates else "",
        "batches": str(batches) if validates and batches is not None else "",
        "writes to": str(Path(runs) / (log.explicit_log_dir or Path(base) / (log.name or "default"))),
        "changed": in_shell(changes),
    }
    # This block is printed before the checks, which refuse a secret among the changes.
    return redact_text("\n".join([name, *(f"  {fact:12}{value}" for fact, value in facts.items() if value)]))


def _by_tokenizer(recipe: Any, machine: "Machine") -> Optional[int]:
    """The model's parameters with the vocabulary of the tokenizer that the data module makes, as that of mock data."""
    from nemo2.checks.facts import read_facts
    from nemo2.errors import ConfigError
    from nemo2.planner.recipe import shape_of

    try:
        return shape_of(read_facts(recipe, machine=machine)).parameters
    except (ConfigError, AttributeError, TypeError):
        return None
