# SPDX-License-Identifier: Apache-2.0
"""What a source of a model's tensors can be asked: released weights, and checkpoints of any layout."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo2.hugging_face.streams import Stretch
from nemo2.models.conversion.table import Conversion, Entry


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
