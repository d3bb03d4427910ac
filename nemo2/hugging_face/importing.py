# SPDX-License-Identifier: Apache-2.0
"""Converts released weights into a checkpoint while reading them, without building a model or a process group.

Torch's distributed checkpoints are files of archives, one per tensor, and ``.metadata``, which says which part of which
tensor each archive holds. Torch writes the archives without their tensors' bytes (`torch.serialization.skip_data`:
holes in the file). `nemo2.checkpoint.reading` finds the positions of these bytes, which are then copied from the
released files.
"""

import fcntl
import glob
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo2.base.errors import CheckpointError
from nemo2.base.files import output_folder, refuse_existing
from nemo2.checkpoint.context import tokenizer_settings, write_parts
from nemo2.checkpoint.directory import MANIFEST, WEIGHTS_PATH, Manifest, publish, temporary_name, versions
from nemo2.checkpoint.metadata import COMMON
from nemo2.checkpoint.paths import HUGGING_FACE, checkpoints_of_runs, digest_of
from nemo2.checkpoint.reading import locate
from nemo2.checkpoint.writing import without_crc
from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG
from nemo2.hugging_face.safetensors_files import CONFIG
from nemo2.hugging_face.streams import Planned, Stretch, There, grouped, progress_bar, refuse_full_disk, write_files
from nemo2.hugging_face.tensor_source import TensorSource, weights_dtype
from nemo2.models.conversion.table import Entry

FILE_BYTES = 2 << 30
"""The size of a file of weights. Several files are written, read and hashed in parallel."""
_REPLACED = (MANIFEST, WEIGHTS_PATH, CONFIG, ADAPTER_CONFIG)
"""Names in folders that ``overwrite`` replaces: checkpoints, exports and adapters."""
_EXTRA_STATES = ("linear_", "in_proj", "out_proj", "eh_proj", "output_layer")
"""Modules whose extra state Megatron-Core's checkpoints store beside their weight. It is empty without FP8."""


def write_checkpoint(
    released: TensorSource,
    target: Path | str,
    *,
    tokenizer: Optional[Any] = None,
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
    show_progress: Optional[bool] = None,
    model: Any = None,
    part_of: Optional[str] = None,
) -> Path:
    """Write a checkpoint of weights from any source, which every layout and strategy of nemo2 can read.

    Needs a buffer of some megabytes, whatever the size of the model, and no process group. The checkpoint holds weights
    only: a run can start from it (``resume.restore_config``) but not resume from it.

    Args:
        released: The weights. If the source has fewer rows of the vocabulary than its configuration, the missing rows
            become zeros.
        target: The checkpoint's directory, which appears only when it is complete.
        tokenizer: The tokenizer to store in ``context/`` beside the model's description. None: none.
        dtype: The dtype of the weights in the checkpoint. None: the source's, bit for bit.
        overwrite: Replace ``target`` once the new checkpoint is complete.
        show_progress: Show a bar with the bytes and the remaining time. None: show it if standard error is a terminal.
        model: The model that ``context/`` describes. None: the model of the source's configuration.
        part_of: The checkpoint with the rest of the model, if these weights are only a part. None: they are all of it.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the disk is full, a file of the source ends early, or ``target`` exists.
    """
    final = Path(target).expanduser()
    weights = _Weights(released, weights_dtype(dtype), extra_states=part_of is None)
    with new_folder(final, weights.num_bytes, overwrite=overwrite, reads=[released.folder, part_of]) as temporary:
        folder = temporary / WEIGHTS_PATH
        folder.mkdir()
        with progress_bar(f"Importing {released.folder.name}", weights.num_bytes, show=show_progress) as advance:
            hashes = weights.write(folder, advance)
        described = released.conversion.model(config=released.config) if model is None else model
        write_parts(
            temporary, {"model": described, "tokenizer": tokenizer}, release=getattr(released, "hf_config", None)
        )
        manifest = Manifest(
            step=0,
            consumed_samples=0,
            layout={"world_size": 1, "strategy": f"import of {released.conversion.architectures[0]}"},
            weights_only=True,
            part_of=part_of,
            part_of_digest="" if part_of is None else digest_of(part_of),
            settings=tokenizer_settings(tokenizer),
            versions=versions(),
        )
        by_path = {f"{WEIGHTS_PATH}/{path.name}": value for path, value in hashes.items()}
        publish(temporary, final, manifest, by_path, overwrite=overwrite)
    return final


def check_target(target: Path | str, *, overwrite: bool, reads: Sequence[Path | str | None] = ()) -> Path:
    """The path of the folder to write. Called before anything is downloaded or read.

    Args:
        target: The folder to write.
        overwrite: Replace an existing checkpoint, export or empty folder. Other folders may hold anything.
        reads: The checkpoints and folders that are read. A repository has no folder that could be replaced.

    Raises:
        OutputExists: ``target`` exists, and ``overwrite`` is False.
        CheckpointError: ``target`` holds one of ``reads``, checkpoints of runs or the working directory, or is another
            folder than those that are replaced.
        ConfigError: no folder can be written there.
    """
    final = output_folder(target)
    refuse_existing(final, overwrite=overwrite)
    if not final.exists():
        return final
    read = [Path(str(path).removeprefix(HUGGING_FACE)).resolve() for path in (*reads, Path.cwd()) if path is not None]
    lost = [path for path in read if path.is_relative_to(final.resolve())] or checkpoints_of_runs(final)
    if lost:
        raise CheckpointError(
            f"{final} is not replaced, because {lost[0]} would be deleted with it. Use another directory."
        )
    if any(final.iterdir()) and not any((final / name).exists() for name in _REPLACED):
        raise CheckpointError(
            f"{final} is not replaced, because it is neither a checkpoint nor an export. Use another directory."
        )
    return final


@contextmanager
def new_folder(target: Path, num_bytes: int, *, overwrite: bool, reads: Sequence[Path | str | None]) -> Iterator[Path]:
    """A temporary folder beside ``target``, which the caller fills and renames. After a failure nothing remains. What a killed
    process left of the same target is deleted.

    Raises:
        CheckpointError: see `check_target`; or the disk has no room, or a write failed.
    """
    check_target(target, overwrite=overwrite, reads=reads)
    temporary = temporary_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Eight digits: any text would match those of a target whose name ends alike.
        for left in target.parent.glob(temporary_name(Path(glob.escape(target.name)), "[0-9a-f]" * 8).name):
            with suppress(OSError), _locked(left) as dead:
                if dead:
                    shutil.rmtree(left, ignore_errors=True)
        refuse_full_disk(target, num_bytes)
        temporary.mkdir()
        with _locked(temporary):
            yield temporary
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{target} can't be written: {reason}. The incomplete folder was deleted.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, until this process ends at the latest. False: another process holds the lock, or the file system has
    none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


_Archive = tuple[Entry, _StorageInfo]
"""An entry, and the position of its tensor."""


class _Weights:
    """The contents of ``weights/``, planned and then written."""

    def __init__(self, released: TensorSource, dtype: Optional[torch.dtype], *, extra_states: bool) -> None:
        self.released = released
        self.extra_states = extra_states
        self.dtypes: dict[str, torch.dtype] = {}
        for entry in released.entries:  # all parts of a stacked tensor have the same dtype
            own = released.dtype_of(entry) if dtype is None else (entry.dtype or dtype)
            self.dtypes[entry.key] = torch.promote_types(self.dtypes.get(entry.key, own), own)
        self.num_bytes = sum(map(self._size, released.entries))

    def write(self, folder: Path, advance: Callable[[int], None]) -> dict[Path, str]:
        """Write all files. Returns the SHA-256 of the large ones."""
        archives: list[_Archive] = []
        planned = []
        for number, group in enumerate(grouped(self.released.entries, self._size, most=FILE_BYTES)):
            path = folder / f"__{number}_0.distcp"
            placed, file = self._frames(path, group)
            archives += placed
            planned.append(file)
        hashes = write_files(planned, advance=advance, hashes=True)
        states = folder / f"__{len(planned)}_0.distcp"
        torch.save([None], states)  # an empty extra state, which all modules share
        state = _StorageInfo(states.name, 0, states.stat().st_size)
        (folder / ".metadata").write_bytes(pickle.dumps(self._metadata(archives, state)))
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        torch.save({"nemo2": {"consumed_samples": 0, "global_step": 0}, "global_step": 0}, folder / COMMON)
        return hashes

    def _size(self, entry: Entry) -> int:
        return self.dtypes[entry.key].itemsize * math.prod(entry.own_shape)

    def _frames(self, path: Path, entries: Sequence[Entry]) -> tuple[list[_Archive], Planned]:
        """Write the archives of a file without their tensors' bytes. Returns their positions, and the plan for the
        bytes."""
        archives: list[_Archive] = []
        with open(path, "w+b") as file, without_crc(), torch.serialization.skip_data():
            for entry in entries:
                first = file.tell()
                # The tensor's memory is never touched, so no memory is used.
                stacked = (1,) * len(entry.at)
                torch.save(torch.empty((*stacked, *entry.own_shape), dtype=self.dtypes[entry.key]), file)
                archives.append((entry, _StorageInfo(path.name, first, file.tell() - first)))
        stretches: list[Stretch] = []
        end = 0
        with open(path, "rb") as file:
            for entry, info in archives:
                stored = locate(file, info.offset, info.length)
                assert stored is not None
                stretches.append(There(stored.place - end))
                stretches += self.released.stretches(entry, stored.dtype)
                end = stored.place + self._size(entry)
        stretches.append(There(path.stat().st_size - end))
        return archives, Planned(path=path, stretches=stretches)

    def _metadata(self, archives: Iterable[_Archive], state: _StorageInfo) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for entry, info in archives:
            offsets = torch.Size((*entry.at, *(0 for _ in entry.own_shape)))
            sizes = torch.Size((*(1 for _ in entry.at), *entry.own_shape))
            metadata = tensors.setdefault(
                entry.key,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=self.dtypes[entry.key]),
                    size=torch.Size(entry.shape),
                    chunks=[],
                ),
            )
            places[MetadataIndex(entry.key, offsets, len(metadata.chunks))] = info
            metadata.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            for name in _extra_states(entry) if self.extra_states else ():
                tensors[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = state
        return Metadata(state_dict_metadata=tensors, storage_data=places)


def _extra_states(entry: Entry) -> Iterator[str]:
    """The names of the extra states that Megatron-Core stores beside the weight of this module."""
    module = entry.key.rpartition(".weight")[0]
    if module.rpartition(".")[2].startswith(_EXTRA_STATES):
        of = (entry.at, entry.shape[: len(entry.at)]) if entry.at else ((0,), (1,))
        offset, sizes = (".".join(map(str, numbers)) for numbers in of)
        yield f"{module}._extra_state/shard_{offset}_{sizes}"
