# SPDX-License-Identifier: Apache-2.0
"""``nemo2 distill``: trains a student on a teacher's distributions. ``--write`` writes the recipe for other
commands."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import not_with
from nemo2.cli.flags import spread
from nemo2.cli.launching import TrainingOptions, launched, logged, with_options
from nemo2.cli.run_names import RECIPE_FILE, Checkpoint, checkpoint_called
from nemo2.cli.sources import Overrides, recipe_tree

DISTILL_EXAMPLE = "Example: nemo2 distill runs/small --teacher runs/large trainer.max_steps=1000 optim.config.lr=1e-4"


def register(app: typer.Typer) -> None:
    app.command("distill", epilog=DISTILL_EXAMPLE)(distill)


@with_options
def distill(
    student: Checkpoint,
    teacher: Annotated[str, typer.Option(help="The teacher: a checkpoint directory, or a run (directory or name).")],
    overrides: Overrides = None,
    recipe: Annotated[
        Optional[str],
        typer.Option(
            help="Recipe that provides trainer, data and optimizer. Default: the recipe of the student's or teacher's run."
        ),
    ] = None,
    temperature: Annotated[Optional[float], typer.Option(help="Temperature that divides both models' logits.")] = None,
    top_k: Annotated[
        Optional[int], typer.Option(help="Keep only this many most likely tokens of the teacher, to save memory.")
    ] = None,
    write: Annotated[
        Optional[Path],
        typer.Option(help="Write the recipe to this .json file for other commands, and start nothing."),
    ] = None,
    *,
    options: TrainingOptions,
) -> None:
    """Distill a teacher into a student: train the student on the teacher's token distributions."""
    from nemo2.errors import ConfigError

    not_with("write", "executor", "dryrun", "detach", "chain", "plugins", "force", "yes")
    begin, taught_by = checkpoint_called(student), checkpoint_called(teacher)
    if write is not None and write.suffix != ".json":
        raise ConfigError(f"--write {write}: must be a .json file, which commands accept as a recipe.")
    source = recipe or _run_with_recipe(begin, taught_by)

    def made() -> Any:
        from nemo2.llm.distillation import distillation_recipe

        return distillation_recipe(begin, taught_by, recipe_tree(source), _settings(temperature, top_k))

    name = f"{Path(student).resolve().name}_distilled"
    tree = logged(made, overrides or [], own_name=name, options=options)
    if write is not None:
        from nemo2.config.serialize import to_json

        write.write_text(
            to_json(spread(tree, options.gpus, nodes=options.nodes, devices=options.devices), indent=1) + "\n"
        )
        print(f"{write}: nemo2 check {write}, nemo2 rehearse {write}, nemo2 plan {write}, nemo2 pretrain {write}")
        return
    launched(tree, name=name, changes=overrides or [], options=options)


def _settings(temperature: Optional[float], top_k: Optional[int]) -> Any:
    """The `DistillationConfig` as a config. None: no option sets anything."""
    from nemo2.config import Config
    from nemo2.strategies.teaching import DistillationConfig

    given = {"logit_kl_temperature": temperature, "logit_kl_topk": top_k}
    given = {name: value for name, value in given.items() if value is not None}
    DistillationConfig(**given)  # refuses values out of range
    return Config(DistillationConfig, **given) if given else None


def _run_with_recipe(student: Path, teacher: Path) -> str:
    """The directory of the run that wrote one of the checkpoints.

    Raises:
        ConfigError: neither checkpoint is in a run's directory with a recipe.
    """
    from nemo2.errors import ConfigError
    from nemo2.hugging_face.checkpoint import find_checkpoint

    for path in (student, teacher):
        run = find_checkpoint(path).parent.parent
        if (run / RECIPE_FILE).is_file():
            return str(run)
    raise ConfigError(
        f"Neither {student} nor {teacher} is in a run directory with a recipe: use --recipe NAME to provide trainer, data and "
        "optimizer."
    )
