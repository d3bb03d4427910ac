# SPDX-License-Identifier: Apache-2.0
"""The earlier run that a recipe would resume on this machine, and whether the recipe still fits its checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import CheckpointError
from nemo2.checkpoint.auto_resume import newest_to_resume, refuse_weights_only
from nemo2.checkpoint.changes import (
    refuse_other_shapes,
    unfit_changes,
    unfit_message,
    warn_if_trained_otherwise,
)
from nemo2.checkpoint.foreign_files import NEMO_STATE, is_nemo
from nemo2.checkpoint.paths import checkpoint_at, checkpoint_folders
from nemo2.config.walk import node_at
from nemo2.preflight.checks.facts import Facts, trains
from nemo2.preflight.checks.tokenizers import tokenizer_of
from nemo2.training.run_dir.directory import CHECKPOINTS, DEFAULT_BASE, furthest_run, requested_version


def checkpoints_to_resume(recipe: Any) -> Optional[Path]:
    """The directory of the checkpoints that training with this recipe would resume from. None: it names them itself,
    doesn't resume, or has no earlier run on this machine."""
    parts: list[Any] = [getattr(recipe, name, None) for name in ("resume", "log", "trainer")]
    if not trains(recipe) or None in parts:
        return None
    resume, log, _ = parts
    if resume.resume_from_path or resume.resume_from_directory:
        return None
    if not resume.resume_if_exists:
        return None
    if dirpath := getattr(log.ckpt, "dirpath", None):
        return Path(dirpath).expanduser()
    directory = directory_to_continue(log, newest=True)
    return None if directory is None else directory / CHECKPOINTS


def directory_to_continue(log: Any, *, newest: bool) -> Optional[Path]:
    """The directory of a run that its settings name, or with ``newest`` the newest run of its name. None: a new one."""
    base = Path(log.log_dir or DEFAULT_BASE).expanduser() / (log.name or "default")
    if log.explicit_log_dir:
        return Path(log.explicit_log_dir).expanduser().absolute()
    version = requested_version(log.version)
    directory = base / version if version else furthest_run(base) if newest else None
    return None if directory is None else directory.absolute()


def lacks_a_checkpoint(recipe: Any) -> bool:
    """Whether the recipe must resume an earlier run, and this machine has none."""
    resume = getattr(recipe, "resume", None)
    if resume is None or not resume.resume_if_exists or resume.resume_ignore_no_checkpoint:
        return False
    if resume.resume_from_directory:
        return (
            newest_to_resume(*checkpoint_folders(Path(resume.resume_from_directory).expanduser()), any_run=True) is None
        )
    if node_at(recipe, "log.ckpt") is None:
        return False
    directory = checkpoints_to_resume(recipe)
    return directory is None or newest_to_resume(directory) is None


def weights_alone(recipe: Any) -> Iterator[str]:
    """A message if training would resume from a named checkpoint without the optimizer's state, or load that of NeMo 2.0."""
    if not trains(recipe):
        return
    if named := node_at(recipe, "resume.resume_from_path"):
        try:
            refuse_weights_only(checkpoint_at(str(named)))
        except CheckpointError as error:
            yield f"resume.resume_from_path={named}: {error}"
    begun = node_at(recipe, "resume.restore_config.load_optim_state") and node_at(recipe, "resume.restore_config.path")
    for field, path in {"resume_from_path": named, "restore_config.path": begun}.items():
        if path and is_nemo(place := checkpoint_at(str(path))):
            yield f"resume.{field}={path}: {NEMO_STATE.format(path=place)}"


def weights_of_another_shape(facts: Facts, field: str, path: str) -> Iterator[str]:
    """A message if a checkpoint to start from describes a model whose weights have other shapes. A warning if they were
    trained with other settings."""
    checkpoint, method = checkpoint_at(path), facts.parts.get("peft")
    try:
        refuse_other_shapes(checkpoint, facts.config, name=f"{field}={path}", method=method)
    except CheckpointError as error:
        yield str(error)
    else:
        warn_if_trained_otherwise(checkpoint, facts.config, name=path, method=method)


def changes_that_do_not_fit(facts: Facts) -> Iterator[str]:
    """A message if the checkpoint that the run would resume from belongs to another tokenizer or another shape of the
    model, which every rank would refuse."""
    resume = getattr(facts.recipe, "resume", None)
    if getattr(resume, "accept_changes", False):
        return
    named = getattr(resume, "resume_from_path", None)
    directory = checkpoints_to_resume(facts.recipe)
    checkpoint = checkpoint_at(str(named)) if named else directory and newest_to_resume(directory)
    if not checkpoint:
        return
    changes = unfit_changes(
        checkpoint, model_config=facts.config, tokenizer=tokenizer_of(facts), method=facts.parts.get("peft")
    )
    if changes:
        yield unfit_message(checkpoint, changes)
