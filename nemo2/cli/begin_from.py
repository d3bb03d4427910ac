# SPDX-License-Identifier: Apache-2.0
"""``--from SOURCE``: trains the model of existing weights. Their own description chooses the family and the sizes."""

from typing import Annotated, Any, Optional

import typer

from nemo2.base.errors import ConfigError
from nemo2.cli.run_names import checkpoint_called

From = Annotated[
    Optional[str],
    typer.Option(
        "--from",
        help="Weights to start from: hf://organisation/name, a released folder, a run or a checkpoint. They decide the model; "
        "the recipe decides the rest.",
    ),
]

Weights = Annotated[
    Optional[str],
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint directory, a run (directory or name), which stands for its newest checkpoint, or released weights "
        "(hf://organisation/name, or their folder).",
        show_default=False,
    ),
]
WeightsOption = Annotated[Optional[str], typer.Option("--from", help="The weights, in place of CHECKPOINT.")]


def give_weights(recipe: Any, source: str) -> None:
    """Make ``recipe`` train the model of the weights in ``source``, beginning with them.

    Raises:
        CheckpointError: there are no weights, or they don't describe their model.
        ConfigError: nemo2 has no such model.
    """
    from nemo2 import RestoreConfig
    from nemo2.config import Config
    from nemo2.config.located import recorded_at

    with recorded_at(f"--from {source}", 1):
        recipe.model, path = described_weights(source)
        recipe.resume.restore_config = Config(RestoreConfig, path=path)


def finetuning_of(source: str, *, method: str, packed: bool) -> Any:
    """The recipe that fine-tunes the weights in ``source`` on one GPU, with the settings that all recipes share.

    Args:
        method: "lora", "dora" or "full".
        packed: Whether several samples share a row.

    Raises: see `give_weights`.
    """
    from nemo2.recipes.finetune_default import default_finetune_recipe, dora, lora

    model, path = described_weights(source)
    recipe: Any = default_finetune_recipe(model, path, num_gpus_per_node=1, packed_sequence=packed)
    if method == "full":
        recipe.optim.config.lr = 5e-6
    else:
        recipe.peft = (lora if method == "lora" else dora)()
    return recipe


def described_weights(source: str) -> tuple[Any, str]:
    """The model of the weights in ``source`` as an editable config, and their path as ``resume.restore_config`` has it. The
    sequence length follows the data's, unless positions are learned. Errors: see `give_weights`."""
    from nemo2.hugging_face.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(named_weights(None, source))
    checkpoint.refuse_adapters()
    return checkpoint.model_config(follow_data=True), checkpoint.source


def use_model_of(recipe: Any, source: str) -> str:
    """Let ``recipe`` run the model that the weights in ``source`` describe, with their adapters, in place of its own. Weights
    without a description, such as those of a user's class, keep the recipe's model.

    Returns:
        The path of the weights as ``resume.restore_config`` has it.

    Raises:
        CheckpointError: there are no weights.
        ConfigError: nemo2 has no such model.
    """
    from nemo2.checkpoint.context import describes
    from nemo2.config.aliases import parameter_names
    from nemo2.config.walk import class_of
    from nemo2.hugging_face.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(source)
    if checkpoint.is_release or checkpoint.is_nemo2 and describes(checkpoint.path, "model"):
        recipe.model = checkpoint.model_config(follow_data=True)
        for transform in {"peft", "model_transform"} & {*parameter_names(class_of(recipe))}:
            setattr(recipe, transform, None)
    return checkpoint.source


def named_weights(checkpoint: Optional[str], source: Optional[str]) -> str:
    """The weights that a command uses: the path of a release, of a checkpoint, or of a run's checkpoints.

    Args:
        checkpoint: The command's argument.
        source: Its option --from.

    Raises:
        CheckpointError: there is no such folder and no run of that name.
        ConfigError: both are set, or neither.
    """
    if (checkpoint is None) == (source is None):
        raise ConfigError(
            "Name the weights: a run, a checkpoint, or released weights (--from hf://organisation/name or FOLDER)."
            if checkpoint is None
            else f"{checkpoint} and --from {source} both name the weights: leave one of them out."
        )
    name = checkpoint or source or ""
    return name if name.startswith("hf://") else str(checkpoint_called(name))
