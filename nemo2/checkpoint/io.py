# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed checkpoints behind Lightning's CheckpointIO.

Megatron-Core decides which rank writes which part and how parts are resharded on load. This module decides the name of
a checkpoint, when it counts as saved, and which files accompany it.
"""

import contextlib
import copy
import functools
import inspect
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, TypeVar

from lightning.fabric.plugins import CheckpointIO
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException

from nemo2.base import ranks
from nemo2.base.counts import require_counts
from nemo2.base.errors import CheckpointError, ConfigError, SaveFailed
from nemo2.base.files import locked
from nemo2.checkpoint.background import BackgroundWrite, Image, Saves
from nemo2.checkpoint.directory import (
    WEIGHTS_PATH,
    publish,
    read_manifest,
    remove,
    saving_to,
    temporary_name,
    write_manifest,
)
from nemo2.checkpoint.failures import reason_of, reason_of_any
from nemo2.checkpoint.leftovers import (
    delete_dead,
    delete_failed,
    publish_if_written,
    record_of,
    refuse_missing_shards,
)
from nemo2.checkpoint.writer_process import write_record
from nemo2.checkpoint.writing import WatchedSaveStrategy, planning, with_reason
from nemo2.config.capture import configurable
from nemo2.config.notices import warn_without_effect

if TYPE_CHECKING:
    from nemo2.checkpoint.loading import Loading

StorageOptions = dict[str, Any]
_LITTLE_BYTES = 1 << 26
_Read = TypeVar("_Read")


@configurable
@dataclass(eq=False)
class MegatronCheckpointIO(CheckpointIO):
    """Save and load ``weights/`` in Megatron-Core's ``torch_dist`` format, which any layout can read.

    Raises:
        ConfigError: another format, or a value out of its range.
    """

    save_ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Must be "torch_dist"."""
    load_directly_on_device: bool = True
    """Accepted for NeMo's signature, without effect. Megatron-Core reads into existing tensors."""
    async_save: bool = False
    """Write in the background. Training continues after each rank has copied its state. The checkpoint exists once
    `maybe_finalize_save_checkpoint` finds that every rank has finished writing."""
    torch_dist_multiproc: Optional[int] = None
    """Files per rank, written in parallel. None: Megatron-Core's choice (2; from 0.19 on 1)."""
    assume_constant_structure: bool = False
    """Names and shapes in a state never change. After two consecutive saves with the same plan, later saves reuse it. Saves
    without the optimizer have a separate plan."""
    parallel_save: bool = True
    """Distribute the writing over replicas."""
    parallel_save_within_dp: bool = False
    """Distribute the writing within a data-parallel group only."""
    parallel_load: bool = True
    """Distribute the reading over replicas, which then exchange the tensors."""
    verify: bool = True
    """While loading, compare every file's SHA-256 with the manifest. Each rank hashes some of the files."""
    save_timeout_seconds: Optional[float] = 600.0
    """A writer process that takes longer for a background save is replaced; if the replacement fails too, the rank itself
    writes the files. None: no timeout."""

    def __post_init__(self) -> None:
        if self.save_timeout_seconds is not None and self.save_timeout_seconds <= 0:
            raise ConfigError(
                f"save_timeout_seconds={self.save_timeout_seconds}: must be more than 0 seconds, or None."
            )
        require_counts("strategy", others=(None,), ckpt_torch_dist_multiproc=self.torch_dist_multiproc)
        if self.save_ckpt_format != "torch_dist":
            raise ConfigError(
                f"strategy.save_ckpt_format={self.save_ckpt_format!r}: Megatron-Core no longer supports other formats. Set "
                "save_ckpt_format='torch_dist'."
            )
        warn_without_effect(
            "Megatron-Core reads into the tensors that the model and the optimizer have, wherever they are.",
            load_directly_on_device=(self.load_directly_on_device, True),
        )
        self.fall_back = False
        """Whether a load may use an older checkpoint in place of a damaged one. `AutoResume` decides."""
        self._saves = Saves()
        self._validated = False
        self._planned: dict[frozenset[str], Any] = {}
        """The strategy of the last save, with its plans if they are to be reused. The key is the set of names in the
        state, which differs with and without the optimizer."""

    # ------------------------------------------------------------------------------------------------------ saving

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: os.PathLike | str, storage_options: Optional[StorageOptions] = None
    ) -> None:
        """Write ``checkpoint`` (sharded tensors and plain data) as the checkpoint directory ``path``. Every rank must
        call it.

        Args:
            checkpoint: The state for Megatron-Core: sharded tensors and objects, and plain data that is equal on all
                ranks.
            path: The directory, which exists once the save is done.
            storage_options: ``manifest`` (`Manifest`, required); ``content_metadata`` for Megatron-Core;
                ``write_context``, a function of a directory that rank 0 calls before the checkpoint is published;
                ``published``, a function that every rank calls afterwards; ``overwrite``, see `publish`.

        Raises:
            CheckpointError: the write failed on some rank. The files under the temporary name are deleted, and earlier
                checkpoints are unchanged.
        """
        options = storage_options or {}
        self._publish_some(self._saves.make_room)
        target, attempt = ranks.broadcast((Path(path), uuid.uuid4().hex[:8]))
        temporary = temporary_name(target, attempt)
        files: Optional[list[tuple[Image, str]]] = None
        lock = contextlib.ExitStack()

        @saving_to(target)
        def create() -> None:
            delete_dead(target)
            (temporary / WEIGHTS_PATH).mkdir(parents=True)
            lock.enter_context(locked(temporary))

        try:
            ranks.on_rank_zero(create, error=CheckpointError)
            request, writing = self._plan(checkpoint, temporary / WEIGHTS_PATH, options.get("content_metadata"))
            if not self.async_save:
                request.execute_sync()
            else:
                files = writing.copy_state(request)
                # Megatron-Core's index of the tensors depends on the copies only, not on the files on the disk.
                for finalize in request.finalize_fns:
                    finalize()
            self._describe(temporary, target, options)
        except BaseException as error:  # Ctrl-C too
            for image, _ in files or ():
                image.give_back(keep=0)
            reason = reason_of_any(error)
            if ranks.is_rank_zero():
                shutil.rmtree(temporary, ignore_errors=True)
            lock.close()
            if isinstance(error, CheckpointError) or not isinstance(error, Exception | CheckpointException):
                raise
            raise SaveFailed(
                f"Saving {target} failed: {reason}{_room(target)}. The incomplete checkpoint was deleted, "
                "and earlier checkpoints are unchanged."
            ) from error
        if files is None:
            with contextlib.suppress(OSError):  # the record serves only if this save is killed before it is published
                write_record(str(record_of(temporary, ranks.rank())), writing.hashes)
            with lock:
                self._finish(temporary, target, options, writing.hashes, None)
            return
        write = BackgroundWrite(target.name, files, self.save_timeout_seconds, str(record_of(temporary, ranks.rank())))

        def publish_written() -> None:
            hashes = {os.path.basename(path): digest for path, digest in write.hashes.items()}
            error = write.error
            if error is not None:
                error = with_reason(error, [path for _, path in write.files]) + _room(target)
            with lock:
                self._finish(temporary, target, options, hashes, error)

        self._saves.add(write, publish_written, functools.partial(publish_if_written, temporary, target))

    def _describe(self, temporary: Path, target: Path, options: StorageOptions) -> None:
        """Write everything except the tensors on rank 0: ``context/``, and the manifest without the list of files. A
        failure raises on every rank."""

        def describe() -> None:
            if options.get("write_context") is not None:
                options["write_context"](temporary)
            write_manifest(temporary, options["manifest"])

        _on_rank_zero(describe, target)

    def _plan(
        self, checkpoint: dict[str, Any], weights: Path, content_metadata: Optional[dict]
    ) -> tuple[Any, WatchedSaveStrategy]:
        """Megatron-Core's request for the write, which runs here or in the background."""
        arguments: dict[str, Any] = {
            "validate_access_integrity": not self._validated,
            "async_sharded_save": True,
            "content_metadata": content_metadata,
        }
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            arguments["async_strategy"] = "mcore"  # the other value needs nvidia-resiliency-ext
        names = frozenset(checkpoint)  # Megatron-Core removes some of them
        strategy = self._strategy(self._planned.get(names))
        with planning():
            request = dist_checkpointing.save(checkpoint, str(weights), strategy, **arguments)
        self._validated = True  # the structure stays the same
        if self.assume_constant_structure:
            self._planned[names] = strategy
        return request, getattr(strategy, "base_strategy", strategy)

    def _strategy(self, planned: Any) -> Any:
        """Megatron-Core's strategy for a save, with the plans of the previous save if they are reused. Its writer holds
        the results of this save only."""
        if planned is not None:
            strategy = copy.copy(planned)
            if isinstance(strategy, FullyParallelSaveStrategyWrapper):
                strategy.base_strategy = copy.copy(strategy.base_strategy)
            return strategy
        files: dict[str, Any] = {} if self.torch_dist_multiproc is None else {"thread_count": self.torch_dist_multiproc}
        writing = WatchedSaveStrategy("torch_dist", 1, cached_metadata=self.assume_constant_structure, **files)
        if not self.parallel_save:
            return writing
        within = self.parallel_save_within_dp
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True) if within else None
        return FullyParallelSaveStrategyWrapper(writing, group, self.assume_constant_structure)

    def _finish(
        self, temporary: Path, target: Path, options: StorageOptions, hashes: dict[str, str], error: Optional[str]
    ) -> None:
        """Publish a save. Every rank calls it, with the hashes of its files by name, or its error.

        Raises:
            SaveFailed: a rank could not write, or rank 0 could not publish. The folder is deleted, see `delete_failed`.
        """
        outcomes = ranks.gather((_written(temporary, hashes), error))
        failed = [(rank, words) for rank, (_, words) in enumerate(outcomes) if words is not None]
        written = [part for part, _ in outcomes]

        def publish_proven() -> None:
            _prove(temporary, written)
            manifest = read_manifest(temporary)
            assert manifest is not None
            hashes = {name: value[1] for part in written for name, value in part.items()}
            publish(temporary, target, manifest, hashes, overwrite=options.get("overwrite", False))

        try:
            if failed:
                raise SaveFailed(
                    f"Saving {target} in the background failed: on rank {failed[0][0]}, {failed[0][1]}. It was not "
                    "published, and earlier checkpoints are unchanged."
                )
            _on_rank_zero(publish_proven, target)
        except SaveFailed:
            if ranks.is_rank_zero():
                delete_failed(temporary)
            raise
        if options.get("published") is not None:
            options["published"](target)

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> bool:
        """Publish background saves that every rank has written. Every rank must call it, at the same steps.

        Args:
            blocking: Wait for all of them.

        Returns:
            Whether a checkpoint was published.
        """
        return self._publish_some(functools.partial(self._saves.finish, blocking=blocking))

    def _publish_some(self, publish: Callable[[], _Read]) -> _Read:
        try:
            return publish()
        except (Exception, CheckpointException) as error:
            self.abandon()
            if isinstance(error, CheckpointError):
                raise
            raise SaveFailed(
                f"The asynchronous save failed: {reason_of(error)}. It published no checkpoint, and earlier "
                "checkpoints are unchanged."
            ) from error

    def abandon(self) -> None:
        """Publish the background saves that all ranks have written and discard the others, without communication."""
        self._saves.end()

    def teardown(self) -> None:
        self.maybe_finalize_save_checkpoint(blocking=True)

    # ------------------------------------------------------------------------------------------------------ loading

    @functools.cached_property
    def loading(self) -> "Loading":
        """What loads this run's checkpoints, and remembers which files it has compared."""
        from nemo2.checkpoint.loading import Loading

        return Loading(verify=self.verify, parallel=self.parallel_load)

    def load_checkpoint(
        self,
        path: os.PathLike | str,
        map_location: Any = None,
        weights_only: Optional[bool] = None,
        sharded_state_dict: Optional[dict[str, Any]] = None,
        strict: Optional[str] = None,
    ) -> dict[str, Any]:
        """`Loading.load`. ``map_location`` and ``weights_only`` are accepted for Lightning's signature: pickles are read as
        data, see `untrusted`."""
        return self.loading.load(Path(path), sharded_state_dict, strict)

    def load_content_metadata(self, path: os.PathLike | str) -> dict[str, Any]:
        """Megatron-Core's settings for sharding the optimizer's state at the time of the save. Empty: unknown."""
        return dist_checkpointing.load_content_metadata(preloaded_state_dict=self.load_checkpoint(path)) or {}

    def remove_checkpoint(self, path: os.PathLike | str) -> None:
        """Delete a checkpoint directory. Only one rank calls it."""
        remove(Path(path))


def _room(target: Path) -> str:
    """The free space on ``target``'s disk if it is low, because torch's writer of archives doesn't report a full
    disk."""
    try:
        disk = os.statvfs(target.parent)
    except OSError:
        return ""
    if disk.f_files and not disk.f_favail:
        return " (this disk has no inode left for another file: delete files)"
    free = disk.f_bavail * disk.f_frsize
    return f" ({free / 1e6:.1f} MB are free on this disk)" if free < _LITTLE_BYTES else ""


def _on_rank_zero(action: Callable[[], None], target: Path) -> None:
    """Run a step of the publication of ``target`` on rank 0. Every rank calls it.

    Raises:
        SaveFailed: on every rank, if ``action`` failed.
    """

    def act() -> None:
        try:
            action()
        except CheckpointError as error:
            raise SaveFailed(str(error)) from error
        except Exception as error:
            raise SaveFailed(f"Publishing {target} failed: {reason_of(error)}{_room(target)}.") from error

    ranks.on_rank_zero(act, error=SaveFailed)


def _written(temporary: Path, hashes: dict[str, str]) -> dict[str, tuple[Optional[int], str]]:
    """The size, as this rank sees it, and the SHA-256 of each file that it wrote, by its path in the checkpoint."""
    names = {f"{WEIGHTS_PATH}/{name}": digest for name, digest in hashes.items()}
    return {name: (_size(temporary / name), digest) for name, digest in names.items()}


def _prove(temporary: Path, written: list[dict[str, tuple[Optional[int], str]]]) -> None:
    """Check that this rank sees the files of every rank before they become a checkpoint.

    Raises:
        CheckpointError: a file is missing or differs in size, or was removed after it was written.
    """
    for rank, part in enumerate(written):
        for name, (size, _) in part.items():
            seen = _size(temporary / name)
            if size is None:
                raise CheckpointError(
                    f"{name} of rank {rank} was removed from {temporary.parent} before the checkpoint was published. Keep the "
                    "run's folder while it trains."
                )
            if seen != size:
                there = "isn't there" if seen is None else f"has {seen} bytes there"
                raise CheckpointError(
                    f"Rank {rank} wrote {name} ({size} bytes), which {there} for rank 0, in {temporary.parent}, so "
                    "the ranks do not share this directory. The checkpoint was not published. Set log.log_dir to a "
                    "directory that all nodes share."
                )
    refuse_missing_shards(temporary / WEIGHTS_PATH)


def _size(path: Path) -> Optional[int]:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
