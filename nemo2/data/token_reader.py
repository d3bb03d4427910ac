# SPDX-License-Identifier: Apache-2.0
"""Reads tokens from a .bin file by position instead of through a memory map.

The kernel ends a process with SIGBUS, without a word, if it reads a mapped file beyond its end: a corpus that is written
again is first truncated. Megatron-Core's reader without a map returns uninitialised memory in this case. This reader
raises an error that names the file.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, _BinReader, _FileBinReader, _MMapBinReader

from nemo2.errors import DataError


def read_by_position(dataset: Any) -> None:
    """Let all token files below a Megatron dataset be read by a `TokenReader`. Object storage keeps its reader."""
    for indexed in _indexed(dataset):
        if isinstance(indexed.bin_reader, _MMapBinReader | _FileBinReader):
            indexed.bin_reader = TokenReader(f"{indexed.path_prefix}.bin")


class TokenReader(_BinReader):
    """Read a .bin file. Threads and forked processes may share a reader."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (open as long as the dataset)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """``count`` tokens from the byte ``offset``.

        Raises:
            DataError: the file ends before, or can't be read.
        """
        tokens = np.empty(count, dtype=dtype)
        rest = memoryview(tokens).cast("B") if tokens.size else b""
        try:
            while rest:
                read = os.preadv(self._file.fileno(), [rest], int(offset))
                if not read:
                    raise DataError(
                        f"{self.path} ends at byte {offset}, within tokens that {self.path[:-4]}.idx lists. It was "
                        "truncated while it was read."
                    )
                rest, offset = rest[read:], offset + read
        except OSError as error:
            raise DataError(f"{self.path} can't be read at byte {offset}: {error.strerror}.") from error
        return tokens


def _indexed(dataset: Any) -> Iterator[IndexedDataset]:
    if isinstance(dataset, IndexedDataset):
        yield dataset
        return
    for part in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if part is not None:
            yield from _indexed(part)
