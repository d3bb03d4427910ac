# SPDX-License-Identifier: Apache-2.0
"""``nemo2 inspect``: identifies a checkpoint, and tells whether it is complete and what can use it."""

import dataclasses
from typing import Annotated, Any

import typer

from nemo2.cli.flags import AsJson, print_json
from nemo2.cli.run_names import checkpoint_called
from nemo2.columns import columns
from nemo2.names import visible

EXAMPLE = "Example: nemo2 inspect nemo_experiments/llama_tiny"


def register(app: typer.Typer) -> None:
    app.command("inspect", epilog=EXAMPLE)(inspect)


def inspect(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, a directory of checkpoints, or a run (directory or name).")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and verify its SHA-256.")] = False,
    as_json: AsJson = False,
) -> None:
    """Identify a checkpoint of nemo2, NeMo 2.0, Megatron-LM or Hugging Face.

    Also reports whether the checkpoint is complete. Exit code 2: it isn't complete.
    """
    from nemo2.checkpoint.identify import identify

    found = identify(checkpoint_called(path), verify=verify)
    if as_json:
        print_json(dataclasses.asdict(found) | {"path": str(found.path)})
    else:
        print("\n".join(lines(found)))
    if found.problems:
        raise typer.Exit(2)


def lines(found: Any) -> list[str]:
    """The printed lines about an `Identified` checkpoint."""
    facts = {
        "format": found.kind,
        "path": found.path,
        "step": found.step,
        "samples": None if found.consumed_samples is None else f"{found.consumed_samples:,}",
        "layout": found.layout,
        "holds": {True: "weights only", False: "weights and optimizer state", None: None}[found.weights_only],
        "parameters": None if found.parameters is None else f"{found.parameters:,} ({', '.join(found.dtypes)})",
        "size": f"{size(found.size_bytes)} in {found.files} files",
        "written by": ", ".join(f"{name} {version}" for name, version in found.versions.items()) or None,
        "whole": "yes" if not found.problems else f"NO: {'; '.join(found.problems[:5])}",
    }
    told = [(name, value) for name, value in facts.items() if value is not None]
    told += [("note", note) for note in found.notes]
    return [
        *columns(told),
        *(["next:"] if found.commands else []),
        *(f"  {visible(command)}" for command in found.commands),
    ]


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
