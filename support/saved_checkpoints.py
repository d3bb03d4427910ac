# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without tensors, for whatever looks at their folders and manifests only."""

from pathlib import Path
from typing import Any

from nemo2.checkpoint.directory import Manifest, publish, temporary_name, write_manifest


def manifest(step: int, **fields: Any) -> Manifest:
    return Manifest(**{"step": step, "consumed_samples": 8 * step, "layout": {"tp": 1}} | fields)


def written(target: Path, step: int, text: str | None = None) -> Path:
    """The files of the ranks before the folder is published; ``text`` is what is in their only one."""
    temporary = temporary_name(target)
    (temporary / "weights").mkdir(parents=True)
    (temporary / "weights" / "part").write_text(text or f"step {step}")
    return temporary


def saved(target: Path, step: int, text: str | None = None, *, saved_at: float | None = None, **fields: Any) -> Path:
    """A finished checkpoint. ``fields``: of its manifest."""
    contents = manifest(step, **fields)
    publish(written(target, step, text), target, contents)
    if saved_at is not None:
        contents.saved_at = saved_at
        write_manifest(target, contents)
    return target
