# SPDX-License-Identifier: Apache-2.0
"""``nemo2 prune``: a smaller model out of a checkpoint."""

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.run_names import Checkpoint, checkpoint_called

PRUNE_EXAMPLE = "Example: nemo2 prune runs/first --layers 12 --output checkpoints/small --data llama_tiny"


def register(app: typer.Typer) -> None:
    app.command("prune", epilog=PRUNE_EXAMPLE)(prune)


def prune(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="The checkpoint to write.")],
    layers: Annotated[Optional[int], typer.Option(min=1, help="Layers to keep, the most important ones.")] = None,
    drop: Annotated[Optional[str], typer.Option(help="Layers to drop, counted from 1, by commas.")] = None,
    hidden_size: Annotated[Optional[int], typer.Option(min=1, help="Channels to keep.")] = None,
    ffn_hidden_size: Annotated[Optional[int], typer.Option(min=1, help="Neurons of each layer to keep.")] = None,
    heads: Annotated[Optional[int], typer.Option(min=1, help="Attention heads of each layer to keep.")] = None,
    groups: Annotated[Optional[int], typer.Option(min=1, help="Groups of queries to keep, that heads are in.")] = None,
    data: Annotated[
        Optional[str],
        typer.Option(help="A recipe whose data measure importances. Without it, random tokens do, and say little."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Of the data.")] = 1024,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what stands there.")] = False,
) -> None:
    """Make a smaller model of a checkpoint's, in this process: what matters least to some samples goes."""
    from nemo2.errors import ConfigError

    folder = checkpoint_called(checkpoint)
    numbers = drop.split(",") if drop else []
    if not all(number.strip().isdigit() for number in numbers):
        raise ConfigError(f"--drop {drop}: must be numbers of layers, such as 3,4.")
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
    if data is not None:
        import fiddle

        from nemo2.cli.sources import configured

        built = fiddle.build(configured(data, []).data)
    target = entry(str(folder), str(output), config, num_train_samples=samples, data=built, overwrite=overwrite)
    print(f"{target}\nnext:\n  nemo2 pretrain RECIPE resume.restore_config.path={target}  # train it on")
    print(f"  nemo2 distill {target} --teacher {checkpoint} --recipe RECIPE  # or from the whole model's distributions")
