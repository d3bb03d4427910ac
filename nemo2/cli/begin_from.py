# SPDX-License-Identifier: Apache-2.0
"""``--from SOURCE``: trains the model of existing weights. Their own description chooses the family and the sizes."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

From = Annotated[
    Optional[str],
    typer.Option(
        "--from",
        help="Weights to start from: hf://organisation/name, a released folder, a run or a checkpoint. They decide the model; "
        "the recipe decides the rest.",
    ),
]


def give_weights(recipe: Any, source: str) -> None:
    """Make ``recipe`` train the model of the weights in ``source``, beginning with them.

    Raises:
        CheckpointError: there are no weights, or they don't describe their model.
        ConfigError: nemo2 has no such model.
    """
    from nemo2.checkpoint.auto_resume import RestoreConfig
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
    from nemo2.checkpoint.described import find_checkpoint
    from nemo2.checkpoint.places import HUGGING_FACE
    from nemo2.cli.run_names import checkpoint_called
    from nemo2.hugging_face.safetensors_files import CONFIG
    from nemo2.strategies.teaching import described_model, refuse_adapters

    folder = Path(source).expanduser()
    if source.startswith(HUGGING_FACE) or (folder / CONFIG).is_file():
        path = source if source.startswith(HUGGING_FACE) else f"{HUGGING_FACE}{folder.absolute()}"
        return _released_model(path), path
    checkpoint = find_checkpoint(checkpoint_called(source))
    refuse_adapters(checkpoint)
    return described_model(checkpoint), str(checkpoint.absolute())


def _released_model(path: str) -> Any:
    from nemo2.config import Config
    from nemo2.config.tree import as_config
    from nemo2.hugging_face.released import open_released
    from nemo2.hugging_face.restore import folder_of

    released = open_released(folder_of(path))
    config: Any = as_config(released.config)
    if config.position_embedding_type != "learned_absolute":
        del config.seq_length
    return Config(released.conversion.model, config=config)


def name_of_weights(source: str) -> str:
    """The default name of a run that begins with the weights in ``source``."""
    return source.partition("@")[0].rstrip("/").rpartition("/")[2] or "default"
