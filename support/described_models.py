# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without weights that only describe their model."""

from pathlib import Path
from typing import Any

from support import small_runs


def described(run: Path, tokenizer: Any, **config: Any) -> Path:
    """A checkpoint in the directory ``run``."""
    from nemo2.checkpoint.changes import tokenizer_settings
    from nemo2.checkpoint.context import write_parts
    from nemo2.checkpoint.directory import Manifest, publish

    model = small_runs.build_llama(**{"vocab_size": None} | config)
    model.tokenizer = tokenizer
    made, place = run / "made", run / "checkpoints" / "step=1"
    place.parent.mkdir(parents=True)
    write_parts(made, {"model": model, "tokenizer": tokenizer})
    publish(made, place, Manifest(step=1, consumed_samples=4, layout={}, settings=tokenizer_settings(tokenizer)))
    return place
