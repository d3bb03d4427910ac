# SPDX-License-Identifier: Apache-2.0
"""The base model of a foreign adapter: released weights, or a nemo2 checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fiddle as fdl

from nemo2.base.advice import advice
from nemo2.base.names import listed
from nemo2.checkpoint.paths import HUGGING_FACE
from nemo2.errors import CheckpointError
from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.tensor_source import TensorSource
from nemo2.models.conversion.table import Conversion

_T = TypeVar("_T")


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to."""

    path: str
    """As `Checkpoint.open` takes it."""
    model: Any
    tokenizer: Any
    weights: TensorSource

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def conversion(self) -> Conversion:
        return self.weights.conversion


def named_base(settings: Mapping[str, Any], folder: Path) -> str:
    name = settings.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} does not name the model that it was trained on (base_model_name_or_path). Set "
            f"{advice('--base', 'base_model')} to a checkpoint, hf:///folder or hf://organisation/name."
        )
    revision = f"@{settings['revision']}" if settings.get("revision") else ""
    return name if Path(name).is_dir() or "://" in name else f"{HUGGING_FACE}{name}{revision}"


def open_base(path: Path | str) -> Base:
    checkpoint = Checkpoint.open(path)
    checkpoint.refuse_adapters()
    model = fdl.build(checkpoint.model_config())
    return Base(checkpoint.source, model, checkpoint.tokenizer(), checkpoint.tensors(model.config))


def named_as_in_table(by_name: Mapping[str, _T], conversion: Conversion, names: Collection[str]) -> dict[str, _T]:
    """``by_name``, keyed by names in a file, with the names of the family's table as keys.

    Raises:
        CheckpointError: some names aren't in ``names``.
    """
    named = conversion.named_as_in_table(by_name)
    if strange := sorted(name.rstrip(".") for name in named.keys() - set(names)):
        raise CheckpointError(
            f"The adapter changes {listed(strange, 5)}, which the "
            f"base, a {conversion.architectures[0]}, does not have. Use the base that it was trained on "
            f"({advice('--base', 'base_model=')})."
        )
    return named
