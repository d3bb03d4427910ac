# SPDX-License-Identifier: Apache-2.0
"""``llm.import_ckpt`` and ``llm.export_ckpt``, under NeMo 2.0's names: convert foreign weights into a checkpoint, and a
checkpoint into a folder for Hugging Face's libraries.

Sources are Hugging Face's folders and repositories, checkpoints of NeMo 2.0, and torch_dist checkpoints of Megatron-LM
and frameworks based on it (`nemo2.hugging_face.checkpoint`).
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.names import did_you_mean
from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.paths import HUGGING_FACE, folder_of
from nemo2.config.aliases import register_gone
from nemo2.config.capture import check_arguments
from nemo2.config.notices import only_defaults
from nemo2.data.home import models_home
from nemo2.hugging_face.adapter_import import import_adapter
from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG
from nemo2.hugging_face.adapters import export_adapter
from nemo2.hugging_face.checkpoint import Checkpoint, name_of_weights
from nemo2.hugging_face.exporting import export_weights
from nemo2.hugging_face.importing import write_checkpoint
from nemo2.hugging_face.output_folders import check_target
from nemo2.hugging_face.tokenizers import put_tokenizer

_log = logging.getLogger(__name__)
TARGETS = ("hf", "hf-peft")
"""The formats that a checkpoint can be exported to: a model, or its adapters alone."""
register_gone(
    "nemo2.hugging_face.api:export_ckpt", modelopt_export_kwargs="llm.ptq writes quantized models. Leave it out."
)


@check_arguments
def import_ckpt(
    model: Optional[Union[pl.LightningModule, TransformerConfig]] = None,
    source: Union[str, Path] = "",
    output_path: Optional[Union[str, Path]] = None,
    overwrite: bool = False,
    *,
    dtype: Optional[torch.dtype] = None,
    show_progress: Optional[bool] = None,
    base_model: Optional[Union[str, Path]] = None,
) -> Path:
    """Convert foreign weights into a nemo2 checkpoint. Builds neither a model nor a process group.

    Args:
        model: The model whose configuration the weights have, or the configuration. None, or a class as the
            configuration: the source's own description.
        source: ``hf://organisation/name``, ``hf:///folder``, or a folder of Hugging Face's, NeMo 2.0's or
            Megatron-LM's. An adapter of ``peft`` works too (`nemo2.hugging_face.adapter_import`).
        output_path: The checkpoint's directory. None: ``organisation/name``, with ``@revision`` if the source has one, or the
            folder's name in `models_home`, where ``nemo://organisation/name`` finds it. An existing checkpoint there is
            returned unchanged.
        overwrite: Replace an existing checkpoint.
        dtype: The dtype of the weights, one of `nemo2.hugging_face.tensor_source.DTYPES`. None: the source's.
        show_progress: Show a bar with the bytes and the remaining time. None: show it if standard error is a terminal.
        base_model: For an adapter, the model that it was trained on. None: as the adapter says.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: weights are missing, damaged, pickles or of another model; the disk is full; or ``target``
            exists.
        ConfigError: nemo2 has no such model, or not with these settings.
        SecurityError: a name in the index leads out of the folder.
    """
    if not source:
        raise ConfigError("import_ckpt requires a source: hf://organisation/name, or a folder with weights.")
    source = str(source)
    target = Path(output_path) if output_path is not None else models_home() / name_of_weights(source, revision=True)
    if output_path is None and not overwrite and read_manifest(target) is not None:
        _log.info("%s is already in %s. Set overwrite=True to import it again.", source, target)
        return target
    target = check_target(target, overwrite=overwrite)
    options: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "show_progress": show_progress}
    config = getattr(model, "config", model)
    kind = config if isinstance(config, type) else None  # the family's class, with the source's sizes
    folder = folder_of(source) if source.startswith(HUGGING_FACE) else Path(source).expanduser()
    if os.path.lexists(folder / ADAPTER_CONFIG):
        if model is not None:
            raise ConfigError(
                f"{folder} contains an adapter, whose model is the model of its base. Set base_model, and remove model."
            )
        return import_adapter(folder, target, base_model=base_model, **options)
    if base_model is not None:
        raise ConfigError(
            f"base_model={base_model!r}: {folder} contains a model and no adapter of peft (adapter_config.json). "
            "Remove base_model."
        )
    checkpoint = Checkpoint.open(source)
    tensors = checkpoint.tensors(None if kind else config)
    if kind is not None and not issubclass(kind, (*tensors.conversion.configs, tensors.conversion.model)):
        raise ConfigError(
            f"model: {folder} contains a {tensors.conversion.architectures[0]}, which is no {kind.__name__}. Remove model, or "
            "use other weights."
        )
    return write_checkpoint(tensors, target, tokenizer=checkpoint.tokenizer(), **options)


@check_arguments
def export_ckpt(
    path: Union[str, Path],
    target: str = "hf",
    output_path: Optional[Union[str, Path]] = None,
    overwrite: bool = False,
    load_connector: Optional[Callable[[Path, str], "Connector"]] = None,
    *,
    model: Any = None,
    dtype: Optional[torch.dtype] = None,
    show_progress: Optional[bool] = None,
) -> Path:
    """Write a checkpoint in Hugging Face's format: weights, config.json, and the original files of its tokenizer.

    Args:
        path: A nemo2 checkpoint of any layout and strategy, a run's directory for its newest checkpoint, or a
            checkpoint of NeMo 2.0 or Megatron-LM. ``nemo://name`` is the imported model of that name.
        target: "hf", or "hf-peft" for the adapters of a fine-tuning run alone (`nemo2.hugging_face.adapters`).
        output_path: The folder. None: ``<path>/<target>``.
        overwrite: Replace an existing folder.
        load_connector: NeMo's argument: makes the exporter. None: `load_connector_from_trainer_ckpt`.
        model: The model whose configuration the weights have, or the configuration. None: the checkpoint's own
            description.
        dtype: As in `import_ckpt`. None: the stored dtype.
        show_progress: As in `import_ckpt`.

    Returns:
        The folder.

    Raises:
        CheckpointError: see `export_weights`.
        ConfigError: see `export_weights`; an unknown target; or ``model`` beside "hf-peft".
        SecurityError: see `export_weights`.
    """
    if load_connector is not None:
        why = "the exporter of load_connector takes only output_path and overwrite."
        only_defaults(why, model=(model, None), dtype=(dtype, None), show_progress=(show_progress, None))
        return load_connector(_to_export(path).path, target)(output_path, overwrite=overwrite)
    exporter = load_connector_from_trainer_ckpt(path, target)
    return exporter(output_path, overwrite=overwrite, model=model, dtype=dtype, show_progress=show_progress)


@dataclass(frozen=True)
class Connector:
    """Export a checkpoint to a target when called."""

    path: Path
    target: str

    @property
    def local_path(self) -> Path:
        """The folder if no other is named."""
        return self.path / self.target

    def __call__(
        self,
        output_path: Optional[Union[str, Path]] = None,
        overwrite: bool = False,
        *,
        model: Any = None,
        dtype: Optional[torch.dtype] = None,
        show_progress: Optional[bool] = None,
    ) -> Path:
        """Export to ``output_path`` and return it. The arguments and errors are those of `export_ckpt`."""
        folder = self.local_path if output_path is None else output_path
        if self.target == "hf-peft":
            only_defaults("an adapter's checkpoint describes its model.", model=(model, None))
            return export_adapter(self.path, folder, dtype=dtype, overwrite=overwrite)
        config = getattr(model, "config", model)
        options: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "show_progress": show_progress}
        target = check_target(folder, overwrite=overwrite, reads=[self.path])
        tokenizer: Any = None
        checkpoint = _to_export(self.path)
        if not checkpoint.is_nemo2:
            config, tokenizer = checkpoint.tensors(config).config, checkpoint.tokenizer()
            options["vocab_size"] = getattr(tokenizer, "vocab_size", None)

        def beside(folder: Path) -> None:
            problem = put_tokenizer(tokenizer or self.path, folder)
            if problem is not None:
                _log.warning("The export of %s has no tokenizer: %s.", self.path, problem.removesuffix("."))

        return export_weights(self.path, target, config=config, beside=beside, **options)


def load_connector_from_trainer_ckpt(path: Union[str, Path], target: str = "hf") -> Connector:
    """The exporter of a checkpoint to ``target``.

    Args:
        path: The checkpoint, or a run's directory.
        target: The form of the export, as in `export_ckpt`.

    Raises:
        ConfigError: an unknown target.
    """
    if target not in TARGETS:
        raise ConfigError(
            f"target={target!r}: must be one of "
            f"{', '.join(map(repr, TARGETS))}{did_you_mean(target, TARGETS, listed=True)}"
        )
    return Connector(_to_export(path).path, target)


def _to_export(path: Union[str, Path]) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    if checkpoint.is_release:
        checkpoint.require_complete()
        raise CheckpointError(f"{checkpoint.path} already has Hugging Face's format, so there is nothing to export.")
    return checkpoint
