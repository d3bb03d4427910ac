# SPDX-License-Identifier: Apache-2.0
"""``nemo2 distill``: trains a student on a teacher's distributions. ``--output`` writes the recipe for other
commands."""

from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing, write_file
from nemo2.cli.commands import not_with
from nemo2.cli.flags import Output, on_machine
from nemo2.cli.launching import TRAINING, TrainingOptions, changes_of, launched, logged
from nemo2.cli.new_recipe import as_source
from nemo2.cli.own_data import Data
from nemo2.cli.run_names import Checkpoint, checkpoint_called
from nemo2.cli.sources import Overrides, recipe_tree, run_with_recipe


def distill(
    student: Checkpoint,
    overrides: Overrides = None,
    *,
    teacher: str,
    recipe: Optional[str] = None,
    data: Data = None,
    temperature: Optional[float] = None,
    top_k: Optional[int] = None,
    output: Output = None,
    options: TrainingOptions = TRAINING,
) -> None:
    """Train a student on a teacher's token distributions.

    Args:
        teacher: The teacher: a checkpoint directory, or a run (directory or name).
        recipe: Recipe that provides trainer, data and optimizer. Default: the recipe of the student's or teacher's run.
        temperature: Temperature that divides both models' logits.
        top_k: Keep only this many most likely tokens of the teacher, to save memory.
        output: Write the recipe to this .json file for other commands, and start nothing.

    Example: nemo2 distill runs/small --teacher runs/large trainer.max_steps=1000 optim.config.lr=1e-4
    """
    not_with("output", "executor", "dryrun", "detach", "chain", "plugins", "force", "yes")
    if output is not None and output.suffix != ".json":
        raise ConfigError(f"--output {output}: must be a .json file, which commands accept as a recipe.")
    if output is not None:
        refuse_existing(output)
    begin, taught_by = checkpoint_called(student), checkpoint_called(teacher)
    source = recipe or str(run_with_recipe(begin, taught_by))

    def student_recipe() -> Any:
        from nemo2.llm.distillation import distillation_recipe

        return distillation_recipe(begin, taught_by, recipe_tree(source), _settings(temperature, top_k))

    name = f"{Path(student).resolve().name}_distilled"
    tree = logged(student_recipe, overrides or [], own_name=lambda _: name, options=options, data=data)
    if output is not None:
        from nemo2.config.serialize import to_json

        placed = on_machine(tree, options=options)
        write_file(output, to_json(placed, indent=1) + "\n", new=True)
        file = as_source(output)
        print(f"{output}: nemo2 check {file}, nemo2 rehearse {file}, nemo2 plan {file}, nemo2 pretrain {file}")
        return
    launched(tree, name=name, changes=changes_of(overrides, data, performance=False), options=options)


def _settings(temperature: Optional[float], top_k: Optional[int]) -> Any:
    """The `DistillationConfig` as a config. None: no option sets anything."""
    from nemo2.config import Config
    from nemo2.training.strategies.distillation import DistillationConfig

    settings = {"logit_kl_temperature": temperature, "logit_kl_topk": top_k}
    settings = {name: value for name, value in settings.items() if value is not None}
    DistillationConfig(**settings)  # refuses values out of range
    return Config(DistillationConfig, **settings) if settings else None
