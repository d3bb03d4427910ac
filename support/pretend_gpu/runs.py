# SPDX-License-Identifier: Apache-2.0
"""Shipped recipes, shrunk as `nemo2.preflight.rehearse.shrink` shrinks them, on the ranks of `support.ranks.run`: on
pretend GPUs, or on CPUs where CUDA_VISIBLE_DEVICES is empty."""

import hashlib
import inspect
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
ALONE = [
    *ONE,
    "strategy.pipeline_model_parallel_size=1",
    "strategy.virtual_pipeline_model_parallel_size=None",
    "strategy.expert_model_parallel_size=1",
    "strategy.expert_tensor_parallel_size=None",
    "trainer.devices=1",
]
"""That, for all recipes."""


def shrunk(
    name: str, *, performance: bool = False, scheme: str | None = None, transformer_engine: bool | None = None
) -> Any:
    """The recipe, its number of processes and what it had to drop. ``scheme``: a fine-tuning's; "full" means all parameters.
    ``transformer_engine``: keep what needs it; None: where it is installed."""
    from nemo2 import recipes
    from nemo2.base.backend.extras import have_te
    from nemo2.preflight.rehearse.shrink import shrink

    module = recipes.get(name)
    if scheme is None:
        recipe = module.pretrain_recipe(performance_mode=performance)
    else:
        recipe = module.finetune_recipe(performance_mode=performance, peft_scheme=None if scheme == "full" else scheme)
    kept = have_te() if transformer_engine is None else transformer_engine
    small = shrink(recipe, max_processes=PROCESSES, steps=STEPS, transformer_engine=kept)
    small.recipe.trainer.strategy.ckpt_async_save = False
    return small


def digest(small: Any) -> str:
    """One text for all shrunk recipes that are the same run: the values in effect, without names and paths. Two classes of model
    configurations that differ in nothing but defaults count as one."""
    from nemo2.base.backend.extras import have_te
    from nemo2.config.show import flatten, format_value

    values = flatten(small.recipe, defaults=True)
    for path in ("log.name", "log.ckpt.save_top_k", "resume.restore_config.path"):
        values.pop(path, None)
    kind = small.recipe.model.config.__fn_or_cls__
    values["model.config._target_"] = next(base for base in kind.__mro__ if _has_methods(base)).__qualname__
    text = "\n".join(f"{path} {format_value(value)}" for path, value in sorted(values.items()))
    return hashlib.sha256(f"{small.processes} {have_te()}\n{text}".encode()).hexdigest()[:16]


def _has_methods(kind: type) -> bool:
    """Besides those of a dataclass."""
    made = {"__init__", "__repr__", "__eq__"}
    members = (value for name, value in vars(kind).items() if name not in made)
    return any(inspect.isroutine(value) or isinstance(value, property) for value in members)


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
    weights: str | None = None,
    teacher: str | None = None,
    strategy: Any = None,
    transformer_engine: bool | None = None,
) -> dict[str, Any]:
    """Train on this rank as one of the run's. A run that saved in ``directory`` goes on from there. ``base``: the checkpoint that
    a fine-tuning starts from; without one it trains all parameters from random weights. ``weights``: what another run starts
    from, as ``resume.restore_config`` has it. ``teacher``: the checkpoint whose distributions the run learns. ``strategy``: a
    config in place of the recipe's."""
    import fiddle as fdl
    import torch

    from nemo2.base.backend import get_backend
    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.config import apply_overrides
    from nemo2.llm import DistillationCallback
    from support import small_runs

    small_runs.quiet()
    recipe = shrunk(name, performance=performance, scheme=scheme, transformer_engine=transformer_engine).recipe
    recipe.log.log_dir, recipe.log.name, recipe.log.use_datetime_version = directory, "run", False
    recipe.trainer.enable_progress_bar = False
    recipe.trainer.max_steps = steps
    recipe.resume.resume_if_exists, recipe.resume.resume_ignore_no_checkpoint = True, True
    if scheme is not None and base is None:
        recipe.peft = None
    if scheme is not None:  # weights of the real size don't fit
        recipe.resume.restore_config = fdl.Config(RestoreConfig, path=base) if base else None
    if weights is not None:
        recipe.resume.restore_config = fdl.Config(RestoreConfig, path=weights)
    if teacher is not None:
        recipe.trainer.callbacks.append(fdl.Config(DistillationCallback, teacher))
    if not save:
        recipe.log.ckpt = None
        recipe.trainer.enable_checkpointing = False
    if strategy is not None:
        recipe.trainer.strategy = strategy
    recipe = apply_overrides(recipe, overrides)
    records = small_runs.Recorder()
    recipe.trainer.callbacks.append(fdl.Config(lambda: records))
    fdl.build(recipe)()
    answer: dict[str, Any] = {
        "losses": records.losses,
        "norms": [norm for norm in records.grad_norms if norm is not None],
        "validation": records.val_losses,
    }
    answer["backend"] = get_backend().name
    if torch.cuda.is_available():
        answer["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    return answer


def other_layout(small: Any) -> list[str]:
    """Overrides that give a shrunk recipe's ranks another layout: the first change that breaks no rule; none if all do."""
    from nemo2.config import apply_overrides
    from nemo2.preflight.checks import find_problems

    strategy = small.recipe.trainer.strategy
    sizes = {
        name: f"strategy.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "expert_model", "context")
    }
    sequence = ["strategy.sequence_parallel=False"]
    changes = [[f"{field}=1"] for name, field in sizes.items() if getattr(strategy, f"{name}_parallel_size") > 1]
    if strategy.tensor_model_parallel_size > 1:
        changes.insert(0, [*changes[0], *sequence])
    else:
        tensor = [f"{sizes['tensor_model']}=2"]
        changes += [[*tensor, "strategy.sequence_parallel=True"], tensor, [*tensor, f"{sizes['expert_model']}=1"]]
    if strategy.pipeline_model_parallel_size > 1:
        changes.append([f"{sizes['pipeline_model']}=1", "strategy.virtual_pipeline_model_parallel_size=None"])
    for overrides in changes:
        if not find_problems(apply_overrides(small.recipe, overrides), devices=small.processes):
            return overrides
    return []


def exported(directory: str, folder: str, *, adapters: bool = False) -> str:
    """Export a run's newest checkpoint, its ``adapters`` merged. The architecture that it is written as, or why it has none."""
    import json

    from nemo2 import llm
    from nemo2.base.errors import ConfigError

    checkpoint = checkpoint_of(directory)
    if adapters:
        checkpoint = llm.peft.merge_lora(checkpoint, Path(directory) / "merged")
    try:
        llm.export_ckpt(checkpoint, "hf", output_path=folder, show_progress=False)
    except ConfigError as error:  # some models have no form of Hugging Face's
        return f"refused: {error}"
    return json.loads((Path(folder) / "config.json").read_text())["architectures"][0]


def checkpoint_of(directory: str) -> Path:
    """The newest checkpoint of a run."""
    return max(Path(directory).glob("**/checkpoints/*-last"), key=lambda path: path.stat().st_mtime_ns)
