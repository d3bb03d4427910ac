# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a ``torch_dist`` checkpoint directly into their destination.

Torch's reader opens each stored tensor as an archive, unpacks it into new memory and copies it to its destination, one
after the other. Such an archive contains the tensor's uncompressed bytes. This module reads them from the file into the
tensor, several tensors at a time. Torch reads archives that hold anything except one plain tensor.
"""

import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.msc_utils import MultiStorageClientFeature
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _ReaderView
from torch.futures import Future

from nemo2.base.variables import replaced
from nemo2.checkpoint.metadata import read_metadata
from nemo2.checkpoint.writer_process import persistently

_THREADS = 4
_AHEAD_BYTES = 1 << 30
"""The number of bytes that may be read into extra memory before they are copied to their destination."""
_REMEMBERED = ("_intermediate_read_item_and_target", "_intermediate_read_items")
_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Dtypes of the storage classes that `torch.save` names in its pickles."""
_NAMES_END = 30
"""The fixed part of a zip entry's header; its last four bytes are the lengths of the name and of the extra field after it."""
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file: its ``shape``, row by row, from byte ``place`` on."""

    file: str
    place: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Agree = Callable[[Optional[Exception]], None]
"""Called on every rank after it has read, with its error if it failed. Raises if any rank failed."""


class DirectReader(FileSystemReader):
    """Torch's reader of checkpoint files, for files with one tensor per archive as `torch.save` writes them.

    Args:
        path: The folder with the files.
        agree: Lets all ranks fail if one fails.
    """

    def __init__(self, path: str | os.PathLike, agree: Optional[Agree] = None) -> None:
        super().__init__(path)
        self._read_metadata: Optional[Metadata] = None
        self._agree = agree

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read_metadata is None:
            self._read_metadata = super().read_metadata(*args, **kwargs)
        return self._read_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that is planned for this rank.

        Raises:
            EOFError: a file is shorter than ``.metadata`` says.
            OSError: a file is unreadable.
        """
        failure: Optional[Exception] = None
        try:
            self._read(plan, planner)
        except Exception as error:
            failure = error
        if self._agree is not None:
            self._agree(failure)
        if failure is not None:
            raise failure
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        # None: torch must unpack the item.
        located = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, wanted in by_file.items():
            located += persistently(self._find_in, name, wanted)
        with ThreadPoolExecutor(_THREADS) as pool:
            _Reads(planner, pool).run(located)
        rest = [item for item, stored in located if stored is None]
        if rest:
            super().read_data(LoadPlan(rest), planner).wait()

    def _find_in(self, name: str, wanted: list[ReadItem]) -> list[tuple[ReadItem, Optional[Stored]]]:
        located = []
        with open(os.path.join(self.path, name), "rb") as file:
            for item in sorted(wanted, key=lambda one: self.storage_data[one.storage_index].offset):
                info = self.storage_data[item.storage_index]
                plain = item.type == LoadItemType.TENSOR and not getattr(info, "transform_descriptors", None)
                located.append((item, locate(file, info.offset, info.length) if plain else None))
        return located


def load_strategy(weights: str, *, parallel: bool) -> Any:
    """Megatron-Core's strategy for loading the folder ``weights``; ``parallel``: replicas read a part each and exchange them."""
    strategy: Any = get_default_load_sharded_strategy(weights)
    strategy.load_tensors_metadata = _tensors_metadata
    return FullyParallelLoadStrategyWrapper(strategy, None) if parallel else strategy


def _tensors_metadata(
    checkpoint_dir: str | os.PathLike, metadata: Optional[Metadata] = None
) -> dict[str, ShardedTensor]:
    """The tensors of a checkpoint by name, without contents.

    This replaces Megatron-Core's method of that name. It passes all of torch's properties of a tensor to torch to make
    an empty tensor, and from 2.15 on torch has more properties than its function accepts.
    """
    if metadata is None:
        metadata = DirectReader(checkpoint_dir).read_metadata()
    return {
        name: ShardedTensor.from_rank_offsets(
            name, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        ).without_data()
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _Reads:
    """Reads in progress, into their destinations or, where that is impossible, into memory that is copied later."""

    def __init__(self, planner: LoadPlanner, pool: ThreadPoolExecutor) -> None:
        self.planner = planner
        self.pool = pool
        self.direct: list[tuple[Pending[None], ReadItem, Tensor]] = []
        self.ahead: list[tuple[Pending[Tensor], ReadItem, Tensor]] = []
        self.bytes_ahead = 0

    def run(self, located: list[tuple[ReadItem, Optional[Stored]]]) -> None:
        for item, stored in located:
            if stored is not None:
                self._start(item, stored)
        self._copy()
        for pending, item, target in self.direct:
            pending.result()
            self.planner.commit_tensor(item, target)

    def _start(self, item: ReadItem, stored: Stored) -> None:
        target = self.planner.resolve_tensor(item).detach()
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if target.size() != torch.Size(lengths):
            raise ValueError(
                f"{item.storage_index.fqn}: the model needs shape {tuple(target.shape)}, but the file has {lengths}"
            )
        if _is_one_stretch(stored, offsets, lengths) and _is_plain_memory(target, stored.dtype):
            place = stored.place + _bytes_before(stored, offsets)
            self.direct.append((self.pool.submit(_read_into, stored.file, place, target), item, target))
            return
        # Megatron-Core's planner remembers its own target (FP8) until that is committed.
        if any(getattr(self.planner, name, None) for name in _REMEMBERED):
            target.copy_(read_part(stored, offsets, lengths))
            self.planner.commit_tensor(item, target)
            return
        self.ahead.append((self.pool.submit(read_part, stored, offsets, lengths), item, target))
        self.bytes_ahead += lengths[0] * math.prod(stored.shape[1:]) * stored.dtype.itemsize if lengths else 0
        if self.bytes_ahead > _AHEAD_BYTES:
            self._copy()

    def _copy(self) -> None:
        for pending, item, target in self.ahead:
            target.copy_(pending.result())
            self.planner.commit_tensor(item, target)
        self.ahead, self.bytes_ahead = [], 0


@contextmanager
def direct_reading(agree: Optional[Agree] = None) -> Iterator[None]:
    """A context in which Megatron-Core reads files with `DirectReader`, and object storage with its own reader."""
    if MultiStorageClientFeature.is_enabled():
        yield
        return

    def reader(checkpoint_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> DirectReader:
        return DirectReader(checkpoint_dir, agree)

    with replaced(mcore, _get_filesystem_reader=reader):
        yield


# ------------------------------------------------------------------------------------------------------ archives


def intact(weights: Path, name: str) -> bool:
    """Whether the archive of the object ``name`` equals what was written, by its CRC-32, which detects every flipped
    bit. Costs nothing beside the hash of its file."""
    metadata = read_metadata(weights)
    places = [info for index, info in metadata.storage_data.items() if index.fqn == name]
    try:
        for info in places:
            with open(weights / info.relative_path, "rb") as file:
                part: Any = _Part(file, info.offset, info.length)
                with zipfile.ZipFile(part) as archive:
                    if archive.testzip() is not None:
                        return False
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError):
        return False
    return bool(places)


def locate(file: Any, offset: int, length: int) -> Optional[Stored]:
    """The tensor in the archive at ``offset`` of ``file``. None: it isn't a tensor whose bytes can be used directly."""
    part = _Part(file, offset, length)
    try:
        with zipfile.ZipFile(part) as archive:  # pyright: ignore[reportArgumentType]  (what it needs of a file is there)
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            data = entries.get("data/0")
            if data is None or data.compress_type != zipfile.ZIP_STORED or "data/1" in entries:
                return None
        if "byteorder" in entries and _content(file, offset, entries["byteorder"]).decode() != sys.byteorder:
            return None
        described = _Description(io.BytesIO(_content(file, offset, entries["data.pkl"]))).load()
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError):
        return None  # torch reports the error
    if not isinstance(described, _Described):
        return None
    shape, dtype = described.shape, described.dtype
    stored = Stored(file=file.name, place=_place(file, offset, data), dtype=dtype, shape=shape)
    return stored if described.stride == _row_by_row(shape) and data.file_size == stored.num_bytes else None


def _place(file: Any, offset: int, entry: zipfile.ZipInfo) -> int:
    """The first byte in ``file`` of an entry, in an archive that begins at ``offset``."""
    file.seek(offset + entry.header_offset)
    header = file.read(_NAMES_END)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return offset + entry.header_offset + _NAMES_END + names


def _content(file: Any, offset: int, entry: zipfile.ZipInfo) -> bytes:
    """The contents of a small entry. Its CRC-32 isn't checked, because torch may not have written one, and the manifest
    has the file's SHA-256."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _SMALL_BYTES:
        raise zipfile.BadZipFile
    file.seek(_place(file, offset, entry))
    return file.read(entry.file_size)


@dataclass(frozen=True)
class _Described:
    """The description of an archive's one tensor in its pickle."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Description(pickle.Unpickler):
    """Read the pickle of one plain tensor. Only the names below are looked up."""

    def persistent_load(self, pid: Any) -> torch.dtype:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or key != "0" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("not the storage of a plain tensor")
        return dtype

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")


def _described(dtype: Any, first: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, *more: Any) -> Any:
    if first != 0 or hooks or any(more) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("not a plain tensor")
    return _Described(dtype, tuple(shape), tuple(stride))


class _Part(_ReaderView):
    """A part of a file as a file. Torch's view of it counts from the end in the wrong direction."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


# ------------------------------------------------------------------------------------------------------ bytes


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _is_plain_memory(target: Tensor, dtype: torch.dtype) -> bool:
    return type(target) is Tensor and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype


def _is_one_stretch(stored: Stored, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Whether this part of the tensor is contiguous in the file: whole rows; or within one row whole sub-rows, and
    so on."""
    first = next((dim for dim, size in enumerate(lengths) if size != 1), len(lengths))
    return all(lengths[dim] == stored.shape[dim] for dim in range(first + 1, len(lengths)))


def _bytes_before(stored: Stored, offsets: tuple[int, ...]) -> int:
    strides = _row_by_row(stored.shape)
    return sum(at * stride for at, stride in zip(offsets, strides, strict=True)) * stored.dtype.itemsize


def read_part(stored: Stored, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """A part of a tensor, taken from the rows that it overlaps."""
    rows = torch.empty((lengths[0], *stored.shape[1:]) if lengths else (), dtype=stored.dtype)
    _read_into(stored.file, stored.place + _bytes_before(stored, (*offsets[:1], *(0 for _ in offsets[1:]))), rows)
    for dim, (at, size) in enumerate(zip(offsets[1:], lengths[1:], strict=True), start=1):
        rows = rows.narrow(dim, at, size)
    return rows


def _read_into(path: str, place: int, target: Tensor) -> None:
    persistently(_read_into_once, path, place, target)


def _read_into_once(path: str, place: int, target: Tensor) -> None:
    array: Any = target.view(-1).view(torch.uint8).numpy()
    view = memoryview(array)
    if not view:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while view:
            count = os.preadv(descriptor, [view], place)
            if count == 0:
                raise EOFError(f"{path} ends at byte {place}, but more bytes were written")
            view, place = view[count:], place + count
    finally:
        os.close(descriptor)
