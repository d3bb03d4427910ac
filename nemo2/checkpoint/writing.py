# SPDX-License-Identifier: Apache-2.0
"""Writes a rank's part of a checkpoint so that a failed writer is an error, never an endless wait.

Megatron-Core plans the contents and the format of each file. This module writes the files of a rank in parallel.
Megatron-Core 0.16 forks a process per file, from a process with threads, and waits for all their reports, even from a
process that the kernel has killed. The reports go through a server process whose death only one rank notices. Here
threads of this process write a rank's files to the disk, or for a background save into memory, from which `background`
writes them to the disk. If a rank's files are missing, the save fails on every rank.

Each file's SHA-256 is computed while it is written.
"""

import errno
import functools
import inspect
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Optional

import torch
import torch.utils.serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import filesystem

from nemo2.base.backend import get_backend
from nemo2.base.variables import replaced
from nemo2.checkpoint.background import Image
from nemo2.checkpoint.directory import sha256
from nemo2.checkpoint.writer_process import persistently

_NOT_USED = object()
_FORMAT: dict[str, Any] = (
    {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
    if "serialization_format" in inspect.signature(filesystem._write_item).parameters
    else {}  # torch before 2.8 has no other format
)


class WatchedSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron-Core's ``torch_dist`` writer, whose files are written by `write_files` or from the memory of
    `copy_state`.

    ``hashes`` holds the SHA-256 of each file that `write_files` wrote on this rank, by its name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report: Optional[Report] = None

    @property
    def hashes(self) -> dict[str, str]:
        return {} if self.report is None else self.report.hashes

    def copy_state(self, request: Any) -> list[tuple[Image, str]]:
        """Copy the state that Megatron-Core's ``request``, planned by this strategy, writes. Returns this rank's files
        in memory with their paths, for `BackgroundWrite`. On a GPU one tensor at a time is copied to the host's memory.

        A lack of memory is reported through `Report`, not raised, because the other ranks wait for this rank's outcome.
        """
        if self.report is None:  # object storage, or nothing to write on this rank
            if request.async_fn is not None:
                arguments = list(request.async_fn_args)
                if request.preload_fn:
                    arguments[1] = request.preload_fn()
                request.async_fn(*arguments)
            return []
        get_backend().synchronize()  # each copying thread has its own stream
        buckets, images = request.async_fn_args[1], list[Image]()

        def take_images() -> Iterator[Image]:
            for _ in buckets:
                images.append(Image.take())
                yield images[-1]

        def fill(bucket: Any, image: Image) -> tuple[list[Any], str]:
            with image.filling() as stream:
                return self._items(stream, bucket), ""

        if not self.report.run(fill, buckets, take_images()):
            for image in images:
                image.give_back(keep=0)
            return []
        return [(image, path) for image, (path, _, _) in zip(images, buckets, strict=True)]

    def write_files(self, rank: int, buckets: list[Any], report: "Report") -> None:
        """Write the files of this rank to the disk. Never raises.

        Args:
            rank: Not used, but part of Megatron-Core's signature.
            buckets: Megatron-Core's ``(path, name, (bytes, tensors))`` for each file.
            report: Receives the outcome.
        """
        del rank
        paths = [path for path, _, _ in buckets]
        report.run(
            functools.partial(persistently, self._write), buckets, describe=lambda words: with_reason(words, paths)
        )

    def _write(self, bucket: Any) -> tuple[list[Any], str]:
        """Write one file to the disk. Returns Megatron-Core's record of it, and its SHA-256."""
        with open(bucket[0], "wb") as stream:
            items = self._items(stream, bucket)
            stream.flush()
            os.fsync(stream.fileno())
        return items, sha256(bucket[0])

    def _items(self, stream: Any, bucket: Any) -> list[Any]:
        """The contents of a file in the order of Megatron-Core's own writer, each with its position."""
        _, name, (plain, tensors) = bucket
        # One tensor at a time, so that the host's memory never holds a GPU's whole state twice.
        here = ((item, tensor.to("cpu")) for item, tensor in tensors)
        write_item = functools.partial(filesystem_async._write_item, *self._transforms, stream)
        with without_crc():
            return [write_item(value, item, name, **_FORMAT) for item, value in chain(plain, here)]

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *rest: Any) -> Any:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *rest)
        self.report = None
        if request.async_fn is None or getattr(writer, "use_msc", False):
            return request  # this rank has nothing to write, or the target is object storage, which has its own writer
        self.report = writer.results_queue = Report()
        self._transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        rank, buckets, _ = request.async_fn_args
        return request._replace(async_fn=self.write_files, async_fn_args=[rank, buckets, self.report])


class Report:
    """The outcome of one rank's writing. It has the interface of the queue that Megatron-Core would use."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self._results: Any = RuntimeError("the files of this rank were not written")

    def get_nowait(self) -> Any:
        return self._results

    def run(
        self,
        write: Callable[..., tuple[list[Any], str]],
        buckets: list[Any],
        *targets: Iterable[Any],
        describe: Callable[[str], str] = str,
    ) -> bool:
        """Call ``write`` for each of Megatron-Core's buckets in a thread of its own, and keep the records and the
        SHA-256 that it returns. Returns whether all succeeded. Never raises, because the other ranks wait for the outcome.

        Args:
            targets: Further arguments of ``write`` for each bucket.
            describe: Completes the words of an error.
        """
        try:
            with ThreadPoolExecutor(max_workers=max(1, len(buckets))) as pool:
                written = list(pool.map(write, buckets, *targets))
        except BaseException as error:
            self._results = RuntimeError(describe(" ".join(str(error).split()) or repr(error)))
            return False
        self._results = {index: items for index, (items, _) in enumerate(written)}
        self.hashes = {name: digest for (_, name, _), (_, digest) in zip(buckets, written, strict=True)}
        return True


@contextmanager
def planning() -> Iterator[None]:
    """A context for Megatron-Core's planning of a save by `WatchedSaveStrategy`.

    Megatron-Core starts a server for an unused queue unless it believes that it has one. It also copies each tensor
    that is a view into a larger buffer, such as parameters and the optimizer's state, because its writers run during
    training. Here the planned tensors are written, or copied, before anything else happens.
    """
    planner, queue = torch_strategies.MCoreSavePlanner, getattr(filesystem_async, "_results_queue", _NOT_USED)
    torch_strategies.MCoreSavePlanner = _Planner  # pyright: ignore[reportAttributeAccessIssue]
    if queue is None:
        filesystem_async._results_queue = _NOT_USED  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch_strategies.MCoreSavePlanner = planner
        if queue is None and filesystem_async._results_queue is _NOT_USED:
            filesystem_async._results_queue = None


class _Planner(torch_strategies.MCoreSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return in_own_storage(data) if isinstance(data, torch.Tensor) else data


def in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its exact size, which can be written without its surroundings. A
    tensor with gaps, or on a GPU, is returned unchanged."""
    tensor = tensor.detach()
    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    is_view = is_plain and 0 < tensor.numel() * tensor.itemsize < tensor.untyped_storage().size()
    if not is_view:
        return tensor
    octets = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return octets.view(tensor.dtype).view(tensor.shape)


def without_crc() -> AbstractContextManager[None]:
    """Don't compute torch's CRC-32 of every tensor. Nothing reads it, and the files have a SHA-256. The setting is per
    thread."""
    return replaced(torch.utils.serialization.config.save, compute_crc32=False)


def with_reason(words: str, paths: list[str]) -> str:
    """An error of writing ``paths``, with the system's reason. Torch's archive writer reports every refusal of the system,
    such as a full disk or a limit on the size of files, as "unexpected pos"."""
    if "unexpected pos" in words:
        words = next((reason for path in paths if (reason := _refusal(path)) is not None), words)
    if os.strerror(errno.EFBIG) in words:
        words = (
            f"{words}: the limit of this process is {resource.getrlimit(resource.RLIMIT_FSIZE)[0]} bytes (ulimit -f)"
        )
    return words


def _refusal(path: str) -> Optional[str]:
    """The system's reason for refusing to extend a file. None: it doesn't refuse, or the file is missing."""
    try:
        with open(path, "r+b", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            file.write(bytes(1 << 16))
            os.fsync(file.fileno())
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{os.path.basename(path)}: {error.strerror}"
    return None
