# SPDX-License-Identifier: Apache-2.0
"""Reads any rows of any tensor of a ``torch_dist`` checkpoint of any layout.

A stored tensor consists of chunks: layers, experts, tensor-parallel rows or columns, or rows of a fully sharded model.
Chunks of whole rows are contiguous in a file, and can be copied without being read into memory.
"""

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from nemo2.base.errors import CheckpointError
from nemo2.checkpoint.directory import weights_dir
from nemo2.checkpoint.metadata import read_metadata, renamed
from nemo2.checkpoint.reading import Stored, locate, read_part
from nemo2.hugging_face.streams import Computed, Copy, Stretch, merged
from nemo2.hugging_face.tensor_source import cast, misfits
from nemo2.models.conversion.families import conversion_of
from nemo2.models.conversion.table import Conversion, Entry

_BLOCK_BYTES = 64 << 20


class _Chunk(NamedTuple):
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Position(NamedTuple):
    """The position of an entry: its key, and its indices on the stacked axes."""

    key: str
    at: tuple[int, ...]


class StoredTensors:
    """The model's tensors in the folder ``weights``. Tensors of the optimizer are ignored."""

    def __init__(self, weights: Path) -> None:
        self.weights = weights
        self._metadata = _named_as_ours(read_metadata(weights))
        self.tensors: dict[str, Any] = {
            key: value
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not key.startswith("optimizer.")
        }
        self._chunks: dict[_Position, list[_Chunk]] = {}
        self._indexed: set[str] = set()
        self._located: dict[_Chunk, Stored] = {}
        self._lock = threading.Lock()

    def find(self, entry: Entry) -> Optional[_Position]:
        """The position of an entry. None: the checkpoint lacks it."""
        one = self.form_of(entry)
        return None if one is None else _Position(one.key, one.at)

    def form_of(self, entry: Entry) -> Optional[Entry]:
        """The entry in this checkpoint, which stacks the layers or doesn't. None: the checkpoint lacks it."""
        return next((one for one in (entry, entry.by_layer) if one.key in self.tensors), None)

    def shape_of(self, entry: Entry) -> Optional[tuple[int, ...]]:
        """The shape of one layer's or one expert's tensor."""
        position = self.find(entry)
        return None if position is None else tuple(self.tensors[position.key].size)[len(position.at) :]

    def dtype_of(self, entry: Entry) -> torch.dtype:
        position = self.find(entry)
        assert position is not None
        return self.tensors[position.key].properties.dtype

    def stretches(self, entry: Entry, dtype: torch.dtype, first: int = 0, last: Optional[int] = None) -> list[Stretch]:
        """The bytes of rows ``first`` to ``last`` of an entry's tensor, in this dtype. None: the last one."""
        last = entry.own_shape[0] if last is None else last
        position = self.find(entry)
        assert position is not None
        shape = entry.own_shape
        copies = list(self._whole_rows(position, first, last)) if dtype == self.dtype_of(entry) else []
        if copies and sum(copy.length for copy in copies) == (last - first) * _row_bytes(shape, dtype):
            return merged(copies)
        step = max(1, _BLOCK_BYTES // max(1, _row_bytes(shape, dtype)))

        def blocks() -> Iterator[Tensor]:
            for row in range(first, last, step):
                yield cast(self.values(entry, row, min(last, row + step)), dtype, of=entry.key)

        return [Computed((last - first) * _row_bytes(shape, dtype), blocks)]

    def values(self, entry: Entry, first: int = 0, last: Optional[int] = None) -> Tensor:
        """Rows ``first`` to ``last`` of an entry's tensor, in memory. None: the last one.

        Raises:
            CheckpointError: no file has some of the rows.
        """
        last = entry.own_shape[0] if last is None else last
        position = self.find(entry)
        assert position is not None
        shape = entry.own_shape
        wanted = torch.empty((last - first, *shape[1:]), dtype=self.dtype_of(entry))
        filled = 0
        for chunk, offsets, lengths, target in self._overlaps(position, first, last):
            piece = read_part(self._stored(chunk), offsets, lengths)[(0,) * len(position.at)]
            wanted[tuple(slice(at, at + length) for at, length in target)] = piece
            filled += piece.numel()
        if filled != wanted.numel():
            raise CheckpointError(
                f"{self.weights}: the files contain only {filled} of the {wanted.numel()} numbers of {position.key}. The "
                "checkpoint is damaged."
            )
        return wanted

    def _whole_rows(self, position: _Position, first: int, last: int) -> Iterator[Copy]:
        for chunk, offsets, lengths, _ in self._overlaps(position, first, last):
            stored = self._stored(chunk)
            stacked = len(position.at)
            if stored.shape[stacked + 1 :] != tuple(self.tensors[position.key].size)[stacked + 1 :]:
                return
            strides = [math.prod(stored.shape[dim + 1 :]) for dim in range(len(stored.shape))]
            before = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
            size = stored.dtype.itemsize
            yield Copy(stored.file, stored.place + before * size, math.prod(lengths) * size)

    def _overlaps(
        self, position: _Position, first: int, last: int
    ) -> Iterator[tuple[_Chunk, tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]]:
        """Each chunk with some of these rows: the chunk, the offsets and lengths of its part, and (offset, length) in the
        rows, by axis."""
        stacked = len(position.at)
        for chunk in self._of(position):
            before = tuple(at - offset for at, offset in zip(position.at, chunk.offsets, strict=False))
            own_offsets, own_sizes = chunk.offsets[stacked:], chunk.sizes[stacked:]
            start, stop = max(first, own_offsets[0]), min(last, own_offsets[0] + own_sizes[0])
            if start < stop:
                offsets = (*before, start - own_offsets[0], *(0 for _ in own_offsets[1:]))
                lengths = (*(1 for _ in before), stop - start, *own_sizes[1:])
                inner = zip(own_offsets[1:], own_sizes[1:], strict=True)
                yield chunk, offsets, lengths, [(start - first, stop - start), *inner]

    def _of(self, position: _Position) -> Sequence[_Chunk]:
        """The chunks that overlap one layer and expert, ordered by row."""
        with self._lock:
            if position.key not in self._indexed:
                self._indexed.add(position.key)
                seen = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.tensors[position.key].chunks}
                for offsets, sizes in sorted(seen):
                    chunk = _Chunk(position.key, offsets, sizes)
                    axes = [range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
                    for at in itertools.product(*axes[: len(position.at)]):
                        self._chunks.setdefault(_Position(position.key, at), []).append(chunk)
            return self._chunks.get(position, [])

    def _stored(self, chunk: _Chunk) -> Stored:
        with self._lock:
            if chunk not in self._located:
                info = self._places[MetadataIndex(chunk.key, torch.Size(chunk.offsets))]
                with open(self.weights / info.relative_path, "rb") as file:
                    stored = locate(file, info.offset, info.length)
                if stored is None or math.prod(stored.shape) != math.prod(chunk.sizes):
                    raise CheckpointError(
                        f"{self.weights / info.relative_path}: {chunk.key} at byte {info.offset} is not a plain "
                        f"tensor of {list(chunk.sizes)}. The checkpoint is damaged, or has a format that nemo2 cannot "
                        "export."
                    )
                # Its shape may lack stacked axes of length 1.
                self._located[chunk] = Stored(
                    file=stored.file, place=stored.place, dtype=stored.dtype, shape=chunk.sizes
                )
            return self._located[chunk]

    @cached_property
    def _places(self) -> dict[MetadataIndex, Any]:
        return {MetadataIndex(index.fqn, index.offset): info for index, info in self._metadata.storage_data.items()}


class StoredWeights(StoredTensors):
    """The weights of a ``torch_dist`` checkpoint of any layout as a `nemo2.hugging_face.tensor_source.TensorSource`. No
    tensor is read.

    Args:
        folder: The checkpoint.
        config: nemo2's configuration of the model.
        rows_are_known: Whether the configuration or a tokenizer tells which rows of the vocabulary are padding. False: a
            ``vocab_size`` of None becomes the number of stored rows.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights belong to another model.
        ConfigError: nemo2 has no conversion for the model.
    """

    def __init__(self, folder: Path, config: Any, *, rows_are_known: bool) -> None:
        super().__init__(weights_dir(folder))
        self.folder, self.conversion = folder, conversion_of(config)
        rows = vocabulary_rows(self.conversion, config, self)
        unknown = config.vocab_size is None and not rows_are_known
        self.config = replace(config, vocab_size=rows) if unknown else config
        self.entries = tuple(self.conversion.entries(self.config, vocab_rows=rows))
        refuse_misfits(folder, self.entries, self)


def vocabulary_rows(conversion: Conversion, config: Any, stored: StoredTensors) -> int:
    """The rows of the embedding in the files, including padding."""
    for entry in conversion.entries(config, vocab_rows=1):
        if entry.vocabulary and (shape := stored.shape_of(entry)):
            return shape[0]
    return config.vocab_size or 1


def refuse_misfits(checkpoint: Path, entries: Sequence[Entry], stored: StoredTensors) -> None:
    found = [(entry, one) for entry in entries if (one := stored.form_of(entry)) is not None]
    missing = list(dict.fromkeys(entry.key for entry in entries if stored.form_of(entry) is None))
    keys = {one.key for pair in found for one in pair} | {*missing}
    extra = sorted(key for key in stored.tensors if key not in keys)
    shapes = {one.key: (tuple(stored.tensors[one.key].size), one.shape) for _, one in found}
    other = [
        f"{key} has shape {list(there)} there, and {list(wanted)} by the configuration"
        for key, (there, wanted) in shapes.items()
        if there != wanted
    ]
    if problems := misfits(missing, extra, other, model="Hugging Face's model"):
        merge = " Merge the parameters of a model_transform into the model before you export it." if extra else ""
        raise CheckpointError(
            f"{checkpoint} is not the model that the configuration describes: {'; '.join(problems)}.{merge}"
        )


def _named_as_ours(metadata: Any) -> Any:
    """The metadata with the prefix "module." before the model's names. Megatron-LM and Megatron-Bridge store names
    without the prefix."""
    names = metadata.state_dict_metadata
    if any(name.startswith("module.") for name in names):
        return metadata
    return renamed(metadata, {name: f"module.{name}" for name in names if not name.startswith("optimizer.")})


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize
