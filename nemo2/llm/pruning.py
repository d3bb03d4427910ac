# SPDX-License-Identifier: Apache-2.0
"""``llm.prune``: makes a smaller model from a checkpoint, out of the parts that matter most for some samples.

`nemo2.llm.importances` measures the parts, and `nemo2.llm.pruned` selects and copies them. Train the pruned model
further, preferably with `nemo2.llm.distill` and the whole model as its teacher.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from rich.console import Console
from rich.progress import track
from torch import Tensor

from nemo2.base import ranks
from nemo2.base.advice import advice
from nemo2.base.backend import get_backend
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.place import is_terminal
from nemo2.config.capture import captured_arguments, configurable
from nemo2.config.notices import only_defaults
from nemo2.data.mock import MockDataModule
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.output_folders import check_target
from nemo2.llm.importances import importances_of
from nemo2.llm.inference import loaded
from nemo2.llm.pruned import PruningConfig as PruningConfig
from nemo2.llm.pruned import Sizes
from nemo2.mcore.parallel.inspection import named_parameters
from nemo2.models.layers.spec import local_layer_spec
from nemo2.training.strategies.set_up import set_up
from nemo2.training.strategy import MegatronStrategy
from nemo2.training.trainer import Trainer

_log = logging.getLogger(__name__)


@configurable
def prune(
    nemo_checkpoint: str,
    save_path: str,
    pruning_config: PruningConfig,
    devices: int = 1,
    num_nodes: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    num_layers_in_first_pipeline_stage: Optional[int] = None,
    num_layers_in_last_pipeline_stage: Optional[int] = None,
    num_train_samples: int = 1024,
    data: Optional[pl.LightningDataModule] = None,
    tokenizer_path: Optional[str] = None,
    legacy_ckpt: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint of a smaller model.

    The parameters up to ``legacy_ckpt`` are NeMo 2.0's, in NeMo's order.

    Args:
        nemo_checkpoint: A checkpoint of a dense model, or a run's directory.
        save_path: The new checkpoint.
        pruning_config: The sizes of the pruned model.
        devices, num_nodes, tp_size, pp_size: The layout in which the model is pruned; torchrun starts the processes.
            Use a pipeline for a model that is too large for one process. Replicas share the samples. ``tp_size`` splits
            layers, which can then only be dropped as a whole.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: The layers of a first or last stage that
            differs from the other stages. None: the same number as in the other stages.
        tokenizer_path, legacy_ckpt: Must have their defaults, because the tokenizer is the checkpoint's.
        num_train_samples: The number of samples from ``data`` with which importances are measured.
        data: The samples. Data without a tokenizer use the checkpoint's. None: random tokens, whose importances say
            little. With ``drop_layers`` alone, nothing is measured.
        overwrite: Replace an existing checkpoint.

    Returns:
        ``save_path``.

    Raises:
        CheckpointError: the checkpoint is missing or doesn't describe its model, or ``save_path`` exists.
        ConfigError: the model can't be pruned to a size, its family isn't supported, or the layout isn't; or the
            checkpoint holds only a part of a model.
    """
    only_defaults(
        "nemo2 prunes models with their own tokenizer.",
        tokenizer_path=(tokenizer_path, None),
        legacy_ckpt=(legacy_ckpt, False),
    )
    require_counts("", num_train_samples=num_train_samples)
    target = check_target(save_path, overwrite=overwrite)
    whole = Checkpoint.open(nemo_checkpoint)
    whole.refuse_adapters()
    check_target(target, overwrite=overwrite, reads=[whole.path])
    layout: dict[str, Any] = {"tensor_model_parallel_size": tp_size, "pipeline_model_parallel_size": pp_size}
    ends = {
        "num_layers_in_first_pipeline_stage": num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": num_layers_in_last_pipeline_stage,
    }

    def trainer_for(**stages: Any) -> Trainer:
        strategy = MegatronStrategy(ckpt_async_save=False, **layout, **stages)
        return Trainer(strategy=strategy, devices=devices, num_nodes=num_nodes, logger=False, enable_progress_bar=False)

    def look_at(model: Any) -> None:
        Sizes(model.config, pruning_config).refuse_layout(tp_size=tp_size, pp_size=pp_size)
        _in_plain_layers(model)

    with loaded(nemo_checkpoint, trainer_for(**ends), before=look_at) as model, torch.no_grad():
        sizes = Sizes(model.config, pruning_config)
        measured = sizes.in_width or pruning_config.target_num_layers is not None
        samples = _samples(model, data, num_train_samples) if measured else ()
        kept = sizes.kept(importances_of(model, samples, width=sizes.in_width))
        weights = {
            renamed: kept.cut(name, tensor.detach())
            for name, tensor in named_parameters(model.trainer)
            if (renamed := kept.renamed(name)) is not None
        }
        small = type(model)(config=sizes.config(kept.layers), tokenizer=model.tokenizer)
        _in_plain_layers(small)
    trainer = trainer_for(**sizes.stages(pp_size))
    with set_up(trainer, small), torch.no_grad():
        _hand_over(weights, dict(named_parameters(trainer)))
        trainer.save_checkpoint(target, weights_only=True, storage_options={"overwrite": overwrite})
    return target


def _in_plain_layers(model: Any) -> None:
    """Build the model with plain layers, because Transformer Engine's layers contain their norms, whose outputs
    can't be measured. The saved checkpoint is the same."""
    model.config.transformer_layer_spec = local_layer_spec


def _hand_over(weights: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Fill ``parameters`` from ``weights``, which may be on other pipeline stages, one parameter after the other.

    Every rank of the pipeline must call this. ``weights`` is emptied.
    """
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    held = zip(torch.distributed.get_process_group_ranks(group), ranks.gather(mine, group=group), strict=True)
    owners = {name: (rank, *form) for rank, theirs in held for name, form in theirs.items()}
    if missing := parameters.keys() - owners.keys():
        raise ConfigError(
            f"The model has no {min(missing)}, so that the pruned model would keep random values. Merge the parameters of a "
            "model_transform into the model before you prune it."
        )
    for name, (owner, shape, dtype) in sorted(owners.items()):
        if name in weights:
            tensor = weights.pop(name).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=get_backend().device)
        torch.distributed.broadcast(tensor, owner, group=group)
        if name in parameters:
            parameters[name].copy_(tensor)


def _samples(model: Any, data: Any, count: int) -> Iterator[Tensor]:
    """This replica's part of ``count`` samples of the data's training set, one by one, ``[1, sequence]``."""
    if data is None:
        how = advice("Use --recipe RECIPE, whose data are samples", "Set data to samples")
        _log.warning(f"prune measures importances on random tokens. {how} of the model's intended use.")
        data = MockDataModule(seq_length=model.config.seq_length, tokenizer=model.tokenizer, num_workers=0)
    own = captured_arguments(data) or {}
    if model.tokenizer is not None and not any(own.get(name) for name in ("tokenizer", "vocab_file")):
        data.tokenizer = model.tokenizer
    data.trainer = model.trainer
    data.prepare_data()
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    first, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    places = range(first, min(count, len(dataset)), replicas)
    shown = ranks.is_rank_zero() and is_terminal(sys.stderr)
    console = Console(stderr=True)
    for place in track(places, "measuring importances", console=console, transient=True, disable=not shown):
        yield torch.as_tensor(dataset[place]["tokens"])[None]
