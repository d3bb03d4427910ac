# SPDX-License-Identifier: Apache-2.0
"""PEFT methods under NeMo's name ``llm.peft``, and functions that merge and export trained adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl

from nemo2.base.errors import CheckpointError
from nemo2.config.capture import check_arguments
from nemo2.models.peft import PEFT, CanonicalDoRA, CanonicalLoRA, DoRA, LoRA, ModuleMatcher
from nemo2.models.peft import canonical_lora as canonical_lora
from nemo2.models.peft import dora as dora
from nemo2.models.peft import lora as lora

__all__ = [
    "PEFT",
    "PEFT_STR2CLS",
    "CanonicalDoRA",
    "CanonicalLoRA",
    "DoRA",
    "LoRA",
    "ModuleMatcher",
    "export_lora",
    "gpt_lora",
    "merge_lora",
]

PEFT_STR2CLS: dict[str, type[PEFT]] = {
    "LoRA": LoRA,
    "lora": LoRA,
    "DoRA": DoRA,
    "dora": DoRA,
    "CanonicalLoRA": CanonicalLoRA,
    "canonical_lora": CanonicalLoRA,
    "CanonicalDoRA": CanonicalDoRA,
    "canonical_dora": CanonicalDoRA,
}
"""Methods by their names in ``peft_scheme`` and in configuration files."""


def gpt_lora() -> PEFT:
    """`LoRA` with its defaults."""
    return LoRA()


@check_arguments
def merge_lora(
    lora_checkpoint_path: Union[str, Path],
    output_path: Union[str, Path],
    legacy_ckpt: bool = False,
    trainer: Optional[pl.Trainer] = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint of the whole model, with the adapters of LoRA or a method derived from it merged into the
    weights.

    Args:
        lora_checkpoint_path: A checkpoint of a fine-tuning run, or the run's directory for its newest checkpoint. The
            base model is read from the same place as in the run.
        output_path: The new checkpoint.
        legacy_ckpt: Must have its default, because every checkpoint is read in its own format.
        trainer: A trainer with a `MegatronStrategy`, in whose layout the weights are merged. None: one process.
        overwrite: Replace an existing checkpoint.

    Returns:
        ``output_path``.

    Raises:
        CheckpointError: there is no checkpoint, it is not of a PEFT run, or ``output_path`` exists.
    """
    from nemo2.config.notices import only_defaults
    from nemo2.hugging_face.checkpoint import Checkpoint
    from nemo2.hugging_face.output_folders import check_target
    from nemo2.llm.inference import single_process_trainer
    from nemo2.models.peft.adapter import merge
    from nemo2.training.strategies.set_up import set_up

    only_defaults("nemo2 reads checkpoints as they are.", legacy_ckpt=(legacy_ckpt, False))
    checkpoint = Checkpoint.open(lora_checkpoint_path).require_nemo2()
    target = check_target(output_path, overwrite=overwrite, reads=[checkpoint.path, checkpoint.base])
    model: Any = checkpoint.model()
    if not isinstance(model.model_transform, PEFT):
        raise CheckpointError(f"{checkpoint.path} does not come from a PEFT run: its context names no method.")
    trainer = trainer or single_process_trainer()
    with set_up(trainer, model, checkpoint=checkpoint.path) as parallel:
        for core in parallel.unwrapped:
            merge(core)
        model.model_transform = None
        trainer.save_checkpoint(target, weights_only=True, storage_options={"overwrite": overwrite})
    return target


@contextmanager
def merged_for_export(checkpoint: Union[str, Path], target: Path) -> Iterator[Path]:
    """The merged checkpoint of `merge_lora` beside ``target``, the export that is made of it. It is deleted afterwards."""
    from nemo2.hugging_face.output_folders import new_folder

    with new_folder(target.with_name(f".{target.name}-merged"), 0, overwrite=False, reads=[]) as folder:
        yield merge_lora(checkpoint, folder / target.name)


@check_arguments
def export_lora(
    lora_checkpoint_path: Union[str, Path],
    output_path: Union[str, Path],
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a fine-tuning run as a folder that Hugging Face's ``peft`` loads on top of the released
    model.

    Args:
        lora_checkpoint_path: A checkpoint of the run, or the run's directory for its newest checkpoint.
        output_path: The folder, with ``adapter_config.json`` and ``adapter_model.safetensors``.
        overwrite: Replace an existing folder.

    Returns:
        ``output_path``.

    Raises:
        CheckpointError: as in `nemo2.hugging_face.adapters.export_adapter`.
        ConfigError: as in `nemo2.hugging_face.adapters.export_adapter`.
    """
    from nemo2.hugging_face.adapters import export_adapter

    return export_adapter(lora_checkpoint_path, output_path, overwrite=overwrite)
