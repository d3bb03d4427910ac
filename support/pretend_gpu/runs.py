# SPDX-License-Identifier: Apache-2.0
"""Shipped recipes, shrunk as `nemo2.rehearse.shrink` shrinks them, on the ranks of `support.ranks.run`: on pretend GPUs, or on
CPUs where CUDA_VISIBLE_DEVICES is empty."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 3
PROCESSES = 4
"""The most ranks of a shrunk recipe."""
CPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Variables of ranks that are to see no GPU."""
ONE = ["strategy.context_parallel_size=1", "strategy.tensor_model_parallel_size=1", "strategy.sequence_parallel=False"]
"""The layout of one process, for recipes with tensor and context parallelism."""


def shrunk(name: str, *, performance: bool = False, scheme: str | None = None) -> Any:
    """The recipe, its number of processes and what it had to drop. ``scheme``: a fine-tuning's; "full" means all parameters."""
    from nemo2 import recipes
    from nemo2.rehearse.shrink import shrink

    module = recipes.get(name)
    if scheme is None:
        recipe = module.pretrain_recipe(performance_mode=performance)
    else:
        recipe = module.finetune_recipe(performance_mode=performance, peft_scheme=None if scheme == "full" else scheme)
    small = shrink(recipe, max_processes=PROCESSES, steps=STEPS)
    small.recipe.trainer.strategy.ckpt_async_save = False
    return small


def train(
    directory: str,
    name: str,
    *,
    performance: bool = False,
    scheme: str | None = None,
    steps: int = STEPS,
    overrides: Sequence[str] = (),
    save: bool = True,
    base: str | None = None,
) -> dict[str, Any]:
    """Train on this rank as one of the run's. A run that saved in ``directory`` goes on from there. ``base``: the checkpoint that
    a fine-tuning starts from."""
    import fiddle as fdl
    import torch

    from nemo2.backend import get_backend
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.config import apply_overrides
    from support import small_runs

    small_runs.quiet()
    recipe = shrunk(name, performance=performance, scheme=scheme).recipe
    recipe.log.log_dir, recipe.log.name, recipe.log.use_datetime_version = directory, "run", False
    recipe.trainer.enable_progress_bar = False
    recipe.trainer.max_steps = steps
    recipe.resume.resume_if_exists, recipe.resume.resume_ignore_no_checkpoint = True, True
    if scheme is not None:  # weights of the real size don't fit
        recipe.resume.restore_config = fdl.Config(RestoreConfig, path=base) if base else None
    if not save:
        recipe.log.ckpt = None
        recipe.trainer.enable_checkpointing = False
    recipe = apply_overrides(recipe, overrides)
    records = small_runs.Recorder()
    recipe.trainer.callbacks.append(fdl.Config(lambda: records))
    fdl.build(recipe)()
    answer = {"losses": records.losses, "norms": records.grad_norms, "validation": records.val_losses}
    answer["backend"] = get_backend().name
    if torch.cuda.is_available():
        answer["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    return answer


def checkpoint_of(directory: str) -> Path:
    """The newest checkpoint of a run."""
    return max(Path(directory).glob("**/checkpoints/*-last"), key=lambda path: path.stat().st_mtime_ns)
