# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint at a path, and the model that it describes."""

from pathlib import Path
from typing import Any, Optional

import fiddle as fdl

from nemo2.checkpoint.context import describes, load_context
from nemo2.checkpoint.directory import LAST_SUFFIX
from nemo2.checkpoint.places import newest_in
from nemo2.config.explicit import explicit_fields
from nemo2.errors import CheckpointError


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at ``path``: itself, or the newest one in a run's directory.

    Raises:
        CheckpointError: there is none.
    """
    if (found := newest_in(path)) is not None:
        return found
    raise CheckpointError(
        f"{path} is neither a finished checkpoint nor a directory with finished checkpoints (their names end in "
        f"{LAST_SUFFIX} or contain the step). Give the path that the run printed when it saved, or the run's "
        "directory."
    )


def model_of(checkpoint: Path, *, trust_remote_code: bool = False, seq_length: Optional[int] = None) -> Any:
    """The model that a checkpoint's ``context/`` describes, with its tokenizer and sequence length. Nothing is built.

    Args:
        trust_remote_code: Allow the tokenizer to run the Python code beside its files.
        seq_length: The new sequence length, if it differs from the run's. A model with learned positions keeps the
            run's. None: the run's.
    """
    described = load_context(checkpoint, "model", build=False)
    config = getattr(described, "config", None)
    if seq_length is not None and getattr(config, "position_embedding_type", "learned_absolute") != "learned_absolute":
        config.seq_length = seq_length  # pyright: ignore[reportOptionalMemberAccess]
    model = fdl.build(described)
    trusted = ["transformers:trust_remote_code"] if trust_remote_code else []
    model.tokenizer = load_context(checkpoint, "tokenizer", allowed_modules=trusted)
    if "seq_length" not in explicit_fields(model.config) and describes(checkpoint, "data"):
        data = load_context(checkpoint, "data", build=False)
        if getattr(data, "seq_length", None):
            model.config.seq_length = data.seq_length
    # Userbuffers have the size of a training micro-batch, whereas prompts have any size.
    model.config.tp_comm_overlap = False
    return model
