# SPDX-License-Identifier: Apache-2.0
"""The base model of a foreign adapter: released weights, or a nemo2 checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.io import weights_dir
from nemo2.checkpoint.places import HUGGING_FACE, newest_in, resolved
from nemo2.errors import CheckpointError
from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG
from nemo2.hugging_face.released import open_released
from nemo2.hugging_face.restore import folder_of
from nemo2.hugging_face.stored import StoredTensors
from nemo2.hugging_face.tokenizers import tokenizer_in
from nemo2.models.conversion.families import conversion_of
from nemo2.models.conversion.table import Conversion, Entry

_SHOWN = 5
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that an adapter belongs to."""

    path: str
    model: Any
    tokenizer: Any
    conversion: Conversion
    weights: Any
    """The weights: released ones, or those of a nemo2 checkpoint."""

    @property
    def config(self) -> Any:
        return self.model.config

    def values(self, entry: Entry) -> Tensor:
        """The whole tensor of an entry."""
        if isinstance(self.weights, StoredTensors):
            return self.weights.part(entry, 0, entry.own_shape[0])
        return torch.cat([part for _, part in self.weights.part(entry, slice(0, entry.own_shape[0]))])

    def lengths(self, entry: Entry) -> Tensor:
        """The norm of each row of a weight, in fp32."""
        return self.values(entry).float().norm(dim=1)


def named_base(settings: Mapping[str, Any], folder: Path) -> str:
    name = settings.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} does not name the model that it was trained on (base_model_name_or_path). Set "
            "base_model (--base) to a checkpoint, hf:///folder or hf://organisation/name."
        )
    revision = f"@{settings['revision']}" if settings.get("revision") else ""
    return name if Path(name).is_dir() or "://" in name else f"{HUGGING_FACE}{name}{revision}"


def open_base(path: str) -> Base:
    if not path.startswith(HUGGING_FACE) and (checkpoint := newest_in(resolved(path))) is not None:
        return _checkpoint(checkpoint)
    released = path if path.startswith(HUGGING_FACE) else f"{HUGGING_FACE}{resolved(path).resolve()}"
    folder = folder_of(released)
    found = open_released(folder)
    return Base(
        path=released,
        model=found.conversion.model(config=found.config),
        tokenizer=tokenizer_in(folder),
        conversion=found.conversion,
        weights=found,
    )


def _checkpoint(path: Path) -> Base:
    manifest = read_manifest(path)
    if manifest is not None and manifest.part_of is not None:
        raise CheckpointError(
            f"{path} itself contains adapters for {manifest.part_of}. Merge them (nemo2 merge {path}), and use the "
            "result as the base."
        )
    model = load_context(path, "model")
    described = (path / "context" / "tokenizer.json").is_file()
    return Base(
        path=str(path.resolve()),
        model=model,
        tokenizer=load_context(path, "tokenizer") if described else None,
        conversion=conversion_of(model.config),
        weights=StoredTensors(weights_dir(path)),
    )


def named_as_in_table(given: Mapping[str, _T], conversion: Conversion, known: Collection[str]) -> dict[str, _T]:
    """``given``, keyed by names in a file, with the names of the family's table as keys.

    Raises:
        CheckpointError: some names aren't in ``known``.
    """
    for prefix in conversion.prefixes:
        named = {conversion.name_in_table(name, prefix): one for name, one in given.items()}
        if named.keys() & known:
            break
    else:
        named = dict(given)
    if strange := sorted(name.rstrip(".") for name in named.keys() - set(known)):
        raise CheckpointError(
            f"The adapter changes {', '.join(strange[:_SHOWN])}{' ...' if len(strange) > _SHOWN else ''}, which the "
            f"base, a {conversion.architectures[0]}, does not have. Use the base that it was trained on (--base)."
        )
    return named
