# SPDX-License-Identifier: Apache-2.0
"""``nemo2 prune``: makes a smaller model from a checkpoint."""

import shlex
from typing import Annotated, Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.files import refuse_existing
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.flags import Folder, Overwrite
from nemo2.cli.run_names import Checkpoint, checkpoint_called
from nemo2.cli.sources import configured


def prune(
    checkpoint: Checkpoint,
    *,
    output: Folder,
    layers: Annotated[Optional[int], AT_LEAST_1] = None,
    drop: Optional[str] = None,
    hidden_size: Annotated[Optional[int], AT_LEAST_1] = None,
    ffn_hidden_size: Annotated[Optional[int], AT_LEAST_1] = None,
    heads: Annotated[Optional[int], AT_LEAST_1] = None,
    groups: Annotated[Optional[int], AT_LEAST_1] = None,
    recipe: Optional[str] = None,
    samples: Annotated[int, AT_LEAST_1] = 1024,
    overwrite: Overwrite = False,
) -> Result:
    """Prune a checkpoint's model to a smaller model.

    Runs in this process. Removes the parts that matter least on sample data.

    Args:
        layers: Number of layers to keep.
        drop: Layers to drop, such as 3,4; the first layer is 1.
        hidden_size: Hidden channels to keep.
        ffn_hidden_size: MLP neurons to keep in each layer.
        heads: Attention heads to keep in each layer.
        groups: Query groups to keep in each layer.
        recipe: Recipe whose data measures importance. Default: random tokens, which give poor results.
        samples: Number of samples.

    Example: nemo2 prune runs/first --layers 12 --output checkpoints/small --recipe llama_tiny
    """
    folder = checkpoint_called(checkpoint)
    numbers = drop.split(",") if drop else []
    if not all(number.strip().isdecimal() for number in numbers):
        raise ConfigError(f"--drop {drop}: must be layer numbers, such as 3,4.")
    if layers and numbers:
        raise ConfigError("--layers and --drop both choose the layers: leave one of them out.")
    if not (layers or numbers or hidden_size or ffn_hidden_size or heads or groups):
        raise ConfigError(
            "prune needs a size to keep: --layers, --drop, --hidden-size, --ffn-hidden-size, --heads or --groups. "
            "For example: --layers 12."
        )
    refuse_existing(output, overwrite=overwrite)
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

        built = fiddle.build(configured(recipe, []).data)
    target = entry(str(folder), str(output), config, num_train_samples=samples, data=built, overwrite=overwrite)
    there, teacher = shlex.quote(str(target)), shlex.quote(checkpoint)
    text = f"{target}\nnext:\n  nemo2 pretrain RECIPE resume.restore_config.path={there}  # continue training"
    text += f"\n  nemo2 distill {there} --teacher {teacher} --recipe RECIPE  # or distill the full model into it"
    return Result({"path": str(target)}, text)
