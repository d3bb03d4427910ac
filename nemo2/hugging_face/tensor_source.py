# SPDX-License-Identifier: Apache-2.0
"""What a source of a model's tensors can be asked: released weights, and checkpoints of any layout."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from nemo2.base.errors import ConfigError
from nemo2.base.names import listed
from nemo2.config.dtypes import named_dtype
from nemo2.hugging_face.streams import Stretch
from nemo2.models.conversion.table import Conversion, Entry

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes of weights that are written: integers lose the fractions, and 8 bits need scales."""


def misfits(missing: Sequence[str], extra: Sequence[str], other: Iterable[str], *, model: str) -> list[str]:
    """The clauses of a refusal: tensors that are missing, that have no place in ``model``, and sentences about others."""
    one = ("is", "has"), ("are", "have")
    sentences = list(dict.fromkeys(other))
    return [
        *([f"{listed(missing)} {one[len(missing) > 1][0]} missing"] if missing else []),
        *([f"{listed(extra)} {one[len(extra) > 1][1]} no place in {model}"] if extra else []),
        *([listed(sentences)] if sentences else []),
    ]


def weights_dtype(dtype: Any) -> Optional[torch.dtype]:
    """The dtype of weights to write, which text may name. None: none is set.

    Raises:
        ConfigError: the dtype isn't one of `DTYPES`.
    """
    named = named_dtype(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and named not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(map(str, DTYPES))}, or None.")
    return named


def cast(tensor: Tensor, dtype: torch.dtype, *, of: str) -> Tensor:
    """``tensor`` in this dtype.

    Raises:
        ConfigError: values of the tensor, whose name is ``of``, would become infinite. In practice this is float16.
    """
    result = tensor.to(dtype)
    if dtype is torch.float16 and tensor.dtype is not dtype and bool((result.isinf() & ~tensor.isinf()).any()):
        raise ConfigError(
            f"dtype={dtype}: {of} has values that it cannot represent. Use torch.bfloat16 or torch.float32."
        )
    return result


class TensorSource(Protocol):
    """The tensors of one model, by the entries of its family's table."""

    @property
    def folder(self) -> Path: ...

    @property
    def conversion(self) -> Conversion: ...

    @property
    def config(self) -> Any:
        """nemo2's configuration of the model."""
        ...

    @property
    def entries(self) -> tuple[Entry, ...]: ...

    def dtype_of(self, entry: Entry) -> torch.dtype: ...

    def stretches(self, entry: Entry, dtype: torch.dtype) -> list[Stretch]:
        """The bytes of an entry's tensor in this dtype, row by row."""
        ...

    def values(self, entry: Entry) -> Tensor:
        """The whole tensor of an entry, in memory."""
        ...
