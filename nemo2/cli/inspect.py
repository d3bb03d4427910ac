# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show CHECKPOINT``: identifies a checkpoint, and tells whether it is complete and what can use it."""

import dataclasses
from pathlib import Path
from typing import Any

from nemo2.base.columns import columns
from nemo2.base.counts import byte_size
from nemo2.base.errors import CheckpointError
from nemo2.base.names import visible
from nemo2.cli.adapter import Result
from nemo2.cli.run_names import checkpoint_called, last_started


def is_checkpoint(source: str) -> bool:
    """Whether ``source`` is the directory of a checkpoint, and neither a run's nor a recipe's name."""
    from nemo2 import recipes

    path = Path(source).expanduser()
    if not path.is_dir() or last_started(path) is not None or source in recipes.names():
        return False
    from nemo2.hugging_face.identify import kind_at

    try:
        kind_at(path)
    except CheckpointError:
        return False
    return True


def identified(path: str, *, verify: bool) -> Result:
    """What the checkpoint of nemo2, NeMo 2.0, Megatron-LM or Hugging Face at ``path`` is. Exit code 2: it isn't
    complete."""
    from nemo2.hugging_face.identify import identify

    checkpoint = identify(checkpoint_called(path), verify=verify)
    data = dataclasses.asdict(checkpoint) | {"path": str(checkpoint.path)}
    return Result(data, "\n".join(lines(checkpoint)), 2 if checkpoint.problems else 0)


def lines(checkpoint: Any) -> list[str]:
    """The printed lines about an `Identified` checkpoint."""
    facts = {
        "format": checkpoint.kind,
        "path": checkpoint.path,
        "step": checkpoint.step,
        "samples": None if checkpoint.consumed_samples is None else f"{checkpoint.consumed_samples:,}",
        "layout": checkpoint.layout,
        "holds": {True: "weights only", False: "weights and optimizer state", None: None}[checkpoint.weights_only],
        "parameters": None
        if checkpoint.parameters is None
        else f"{checkpoint.parameters:,} ({', '.join(checkpoint.dtypes)})",
        "size": f"{byte_size(checkpoint.size_bytes)} in {checkpoint.files} files",
        "written by": ", ".join(f"{name} {version}" for name, version in checkpoint.versions.items()) or None,
        "whole": "yes" if not checkpoint.problems else f"NO: {'; '.join(checkpoint.problems[:5])}",
    }
    rows = [(name, value) for name, value in facts.items() if value is not None]
    rows += [("note", note) for note in checkpoint.notes]
    return [
        *columns(rows),
        *(["next:"] if checkpoint.commands else []),
        *(f"  {visible(command)}" for command in checkpoint.commands),
    ]
