# SPDX-License-Identifier: Apache-2.0
"""``llm.import_ckpt`` and ``llm.export_ckpt``, under NeMo 2.0's names: weights of others become a checkpoint of ours, and a
checkpoint becomes a folder that Hugging Face's libraries load.

Sources are folders and repositories of Hugging Face's, checkpoints of NeMo 2.0, and torch_dist checkpoints of Megatron-LM and of
what is built on it (`nemo2.hugging_face.foreign`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import lightning.pytorch as pl
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.places import HUGGING_FACE, newest_in, resolved
from nemo2.data.home import models_home
from nemo2.errors import CheckpointError, ConfigError
from nemo2.hugging_face.adapter_files import is_adapter
from nemo2.hugging_face.adapter_import import import_adapter
from nemo2.hugging_face.exporting import export_weights
from nemo2.hugging_face.foreign import foreign_at, open_foreign
from nemo2.hugging_face.importing import import_weights, write_checkpoint
from nemo2.hugging_face.restore import folder_of
from nemo2.hugging_face.tokenizers import put_tokenizer, tokenizer_in
from nemo2.names import did_you_mean

_log = logging.getLogger(__name__)
TARGETS = ("hf",)
"""What a checkpoint can be exported as."""


def import_ckpt(
    model: Optional[Union[pl.LightningModule, TransformerConfig]] = None,
    source: str = "",
    output_path: Optional[Union[str, Path]] = None,
    overwrite: bool = False,
    *,
    dtype: Optional[torch.dtype] = None,
    show_progress: Optional[bool] = None,
    base_model: Optional[str] = None,
) -> Path:
    """Make a checkpoint of ours from weights of others. Neither a model nor a process group is built.

    Args:
        model: Whose configuration they are of, or the configuration. None, or a class as the configuration: what the source says
            of itself.
        source: ``hf://organisation/name``, ``hf:///folder``, or a folder of Hugging Face's, NeMo 2.0's or Megatron-LM's; an
            adapter of ``peft`` (`nemo2.hugging_face.adapter_import`) too.
        output_path: The checkpoint's directory. None: ``organisation/name``, or the folder's name, in `models_home`, where
            ``nemo://organisation/name`` finds it; one that is there is given back as it is.
        overwrite: Replace what stands there.
        dtype: Of the weights. None: as they are.
        show_progress: A bar with bytes and rest. None: where the error output is a terminal.
        base_model: Of an adapter, what it was trained over. None: what it says of itself.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError, ConfigError, SecurityError: see `import_weights`; the source is no model that nemo2 reads.
    """
    if not source:
        raise ConfigError("import_ckpt needs a source: hf://organisation/name, or a folder with weights.")
    target = Path(output_path).expanduser() if output_path is not None else models_home() / _name_of(source)
    if output_path is None and not overwrite and read_manifest(target) is not None:
        _log.info("%s is in %s already; overwrite=True imports it again.", source, target)
        return target
    folder = folder_of(source) if source.startswith(HUGGING_FACE) else Path(source).expanduser()
    options: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "show_progress": show_progress}
    config = getattr(model, "config", model)
    if isinstance(config, type):
        config = None  # the family's class: sizes are the source's
    if is_adapter(folder):
        if model is not None:
            raise ConfigError(f"{folder} holds an adapter, whose model is its base's: give base_model, and no model.")
        return import_adapter(folder, target, base_model=base_model, **options)
    if base_model is not None:
        raise ConfigError(
            f"base_model={base_model!r}: {folder} holds a model and no adapter of peft (adapter_config.json), and has no base."
        )
    if foreign_at(folder) is not None:
        released = open_foreign(folder, config)
        return write_checkpoint(released, target, tokenizer=released.tokenizer, **options)
    return import_weights(folder, target, config=config, tokenizer=tokenizer_in(folder), **options)


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
    """Write a checkpoint as Hugging Face's libraries load it: weights, config.json, and its tokenizer's files as they came.

    Args:
        path: A checkpoint of ours, of any layout and strategy, or of a run's directory its newest; or one of NeMo 2.0's or
            Megatron-LM's. ``nemo://name`` is the imported model of that name.
        target: "hf".
        output_path: The folder. None: ``<path>/<target>``.
        overwrite: Replace what stands there.
        load_connector: NeMo's; makes what exports. None: `load_connector_from_trainer_ckpt`.
        model: Whose configuration it is of, or the configuration. None: what the checkpoint says of itself.
        dtype: Of the weights. None: as they are stored.
        show_progress: As in `import_ckpt`.

    Returns:
        The folder.

    Raises:
        CheckpointError, ConfigError, SecurityError: see `export_weights`; an unknown target.
    """
    if load_connector is not None:
        return load_connector(find_checkpoint(str(path)), target)(output_path, overwrite=overwrite)
    exporter = load_connector_from_trainer_ckpt(path, target)
    return exporter(output_path, overwrite=overwrite, model=model, dtype=dtype, show_progress=show_progress)


@dataclass(frozen=True)
class Connector:
    """A checkpoint and what it is to become; called, it exports."""

    path: Path
    target: str

    @property
    def local_path(self) -> Path:
        """Where it goes unless a place is named."""
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
        """Export to ``output_path``; returns it. Arguments and errors are those of `export_ckpt`."""
        config = getattr(model, "config", model)
        options: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "show_progress": show_progress}
        target = Path(output_path).expanduser() if output_path is not None else self.local_path
        tokenizer: Any = None
        if read_manifest(self.path) is None:
            foreign = open_foreign(self.path, config)
            config, tokenizer = foreign.config, foreign.tokenizer
            options["vocab_size"] = getattr(tokenizer, "vocab_size", None)

        def beside(folder: Path) -> None:
            problem = put_tokenizer(tokenizer or self.path, folder)
            if problem is not None:
                _log.warning("The export of %s has no tokenizer: %s.", self.path, problem.removesuffix("."))

        return export_weights(self.path, target, config=config, beside=beside, **options)


def load_connector_from_trainer_ckpt(path: Union[str, Path], target: str = "hf") -> Connector:
    """The exporter of a checkpoint to ``target``.

    Raises:
        ConfigError: an unknown target.
    """
    if target not in TARGETS:
        raise ConfigError(
            f"target={target!r}: a checkpoint is exported as {', '.join(map(repr, TARGETS))}{did_you_mean(target, TARGETS)}"
        )
    return Connector(find_checkpoint(str(path)), target)


def find_checkpoint(path: str) -> Path:
    """The checkpoint that ``path`` means: ``nemo://name`` in `models_home`; of a run's directory its newest.

    Raises:
        CheckpointError: there is none.
    """
    folder = resolved(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: there is no folder {folder}.")
    found = newest_in(folder) or foreign_at(folder)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint. `nemo2 inspect {folder}` says what it is.")
    return found


def _name_of(source: str) -> str:
    name = source.removeprefix(HUGGING_FACE).partition("@")[0] if source.startswith(HUGGING_FACE) else source
    return Path(name).name if not source.startswith(HUGGING_FACE) or name.startswith("/") else name
