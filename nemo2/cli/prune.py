# SPDX-License-Identifier: Apache-2.0
"""``nemo2 prune``: makes a smaller model from a checkpoint."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.run_names import Checkpoint, checkpoint_called

PRUNE_EXAMPLE = "Example: nemo2 prune runs/first --layers 12 --output checkpoints/small --recipe llama_tiny"


def register(app: typer.Typer) -> None:
    app.command("prune", epilog=PRUNE_EXAMPLE)(prune)


def prune(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the checkpoint to write.")],
    layers: Annotated[Optional[int], typer.Option(min=1, help="Number of layers to keep.")] = None,
    drop: Annotated[Optional[str], typer.Option(help="Layers to drop, such as 3,4; the first layer is 1.")] = None,
    hidden_size: Annotated[Optional[int], typer.Option(min=1, help="Hidden channels to keep.")] = None,
    ffn_hidden_size: Annotated[Optional[int], typer.Option(min=1, help="MLP neurons to keep in each layer.")] = None,
    heads: Annotated[Optional[int], typer.Option(min=1, help="Attention heads to keep in each layer.")] = None,
    groups: Annotated[Optional[int], typer.Option(min=1, help="Query groups to keep in each layer.")] = None,
    recipe: Annotated[
        Optional[str],
        typer.Option(help="Recipe whose data measures importance. Default: random tokens, which give poor results."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 1024,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")] = False,
) -> None:
    """Prune the model of a checkpoint to a smaller model, in this process.

    Removes the parts that matter least on sample data.
    """
    from nemo2.errors import ConfigError

    folder = checkpoint_called(checkpoint)
    numbers = drop.split(",") if drop else []
    if not all(number.strip().isdigit() for number in numbers):
        raise ConfigError(f"--drop {drop}: must be layer numbers, such as 3,4.")
    if layers and numbers:
        raise ConfigError("--layers and --drop both choose the layers: leave one of them out.")
    if not (layers or numbers or hidden_size or ffn_hidden_size or heads or groups):
        raise ConfigError(
            "prune needs a size to keep: --layers, --drop, --hidden-size, --ffn-hidden-size, --heads or --groups. "
            "For example: --layers 12."
        )
    from nemo2.llm.pruning import PruningConfig
    from nemo2.llm.pruning import prune as entry

    config = PruningConfig(
        target_num_layers=layers,
        drop_layers=[int(number) for number in numbers] or None,
        target_hidden_size=hidden_size,
        target_ffn_hidden_size=ffn_hidden_size,
        target_num_attention_heads=heads,
        target_num_query_groups=groups,
    )
    built: Any = None
    if recipe is not None:
        import fiddle

        from nemo2.cli.sources import configured

        built = fiddle.build(configured(recipe, []).data)
    target = entry(str(folder), str(output), config, num_train_samples=samples, data=built, overwrite=overwrite)
    print(f"{target}\nnext:\n  nemo2 pretrain RECIPE resume.restore_config.path={target}  # continue training")
    print(f"  nemo2 distill {target} --teacher {checkpoint} --recipe RECIPE  # or distill the full model into it")
