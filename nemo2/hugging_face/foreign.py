# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of checkpoints of NeMo 2.0, and of torch_dist checkpoints of Megatron-LM and Megatron-Bridge, in
any layout.

Like nemo2's checkpoints, they are Megatron-Core's files. NeMo and nemo2 prefix names with ``module.``; the others
don't. NeMo describes its model in ``context/model.yaml``, of which plain values are read, without creating a class
(`nemo2.checkpoint.nemo_context`). For the others the user must name the model. Not supported: the states of optimizer,
schedule and random numbers, FP8 scales, adapters, Megatron-LM's older format of one pickle per rank, and models for
which nemo2 has no conversion.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch

from nemo2.checkpoint.directory import CONTEXT_PATH
from nemo2.checkpoint.foreign_files import nemo_adapters
from nemo2.checkpoint.identify import Identified, identify
from nemo2.checkpoint.io import weights_dir
from nemo2.checkpoint.nemo_context import load_nemo_model
from nemo2.data.tokenizer import AutoTokenizer
from nemo2.data.tokenizer_files import tokenizer_files
from nemo2.errors import CheckpointError, ConfigError, SecurityError
from nemo2.hugging_face.exporting import refuse_what_does_not_fit, vocabulary_rows
from nemo2.hugging_face.stored import StoredTensors
from nemo2.hugging_face.streams import Stretch
from nemo2.hugging_face.tokenizers import tokenizer_in
from nemo2.models.conversion.families import conversion_of
from nemo2.models.conversion.table import Conversion, Entry

_NEMO = "NeMo 2.0"
_KINDS = (_NEMO, "Megatron-LM", "Megatron-Bridge", "torch_dist")
_TOKENIZERS = ("nemo_tokenizer", "tokenizer")
"""Folders in NeMo's ``context`` that hold a tokenizer of Hugging Face's."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """The weights of such a checkpoint, as a `nemo2.hugging_face.importing.Source`."""

    folder: Path
    conversion: Conversion
    config: Any
    """nemo2's configuration."""
    entries: tuple[Entry, ...]
    tokenizer: Optional[AutoTokenizer]
    stored: StoredTensors

    def dtype_of(self, entry: Entry) -> torch.dtype:
        return self.stored.dtype_of(entry)

    def stretches(self, entry: Entry, dtype: torch.dtype) -> list[Stretch]:
        """The bytes of an entry's tensor in this dtype, row by row."""
        return self.stored.stretches(entry, 0, entry.own_shape[0], dtype)


def foreign_at(folder: Path) -> Optional[Path]:
    """The checkpoint in ``folder``, which may be a run's directory. None: it has none of these formats."""
    try:
        found = identify(folder)
    except (CheckpointError, SecurityError):
        return None
    return found.path if found.kind in _KINDS else None


def open_foreign(folder: Path, config: Optional[Any] = None) -> Foreign:
    """Open the weights of such a checkpoint. No tensor is read.

    Args:
        folder: The checkpoint, or a run's directory for its newest checkpoint.
        config: nemo2's configuration of the model. None: NeMo's description.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights belong to another model.
        ConfigError: the model is unknown, or nemo2 has no conversion for it.
        SecurityError: the checkpoint names something that isn't data, or leads out of its folder.
    """
    found = identify(folder)
    if found.problems:
        raise CheckpointError(f"{found.path} is damaged: {'; '.join(found.problems[:5])}.")
    if (adapters := nemo_adapters(found.path)) is not None:
        raise CheckpointError(f"{found.path}: {adapters}")
    described: Any = config if config is not None else _described(found)
    conversion = conversion_of(described)
    stored = StoredTensors(weights_dir(found.path))
    rows = vocabulary_rows(conversion, described, stored)
    tokenizer = nemo_tokenizer(found.path)
    if described.vocab_size is None and tokenizer is None:
        # The checkpoint doesn't record which rows are padding.
        described = replace(described, vocab_size=rows)
    entries = tuple(conversion.entries(described, vocab_rows=rows))
    refuse_what_does_not_fit(found.path, entries, stored)
    return Foreign(
        folder=found.path, conversion=conversion, config=described, entries=entries, tokenizer=tokenizer, stored=stored
    )


def _described(found: Identified) -> Any:
    if found.kind == _NEMO and (found.path / CONTEXT_PATH).is_dir():
        return load_nemo_model(found.path).config
    raise ConfigError(
        f"{found.path} is a checkpoint of {found.kind} that does not describe its model in a way that nemo2 can read. "
        "Name a recipe of the same model: --recipe llama3_8b, or model=LlamaModel(config=...)."
    )


def nemo_tokenizer(checkpoint: Path) -> Optional[AutoTokenizer]:
    """The Hugging Face tokenizer that NeMo stored in a checkpoint. None: there is none."""
    folders = (checkpoint / CONTEXT_PATH / name for name in _TOKENIZERS)
    return next((tokenizer_in(folder) for folder in folders if folder.is_dir() and tokenizer_files(folder)), None)
