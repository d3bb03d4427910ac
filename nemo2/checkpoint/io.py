# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed checkpoints behind Lightning's CheckpointIO.

Megatron-Core decides which rank writes which part and how parts are resharded on load. This module decides the name of
a checkpoint, when it counts as saved, and which files accompany it.
"""

import copy
import functools
import inspect
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, TypeVar

from lightning.fabric.plugins import CheckpointIO
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling
from packaging.version import Version
from torch.distributed.checkpoint.api import CheckpointException

from nemo2.base import ranks
from nemo2.base.counts import require_counts
from nemo2.base.errors import (
    LOST_PEER,
    ON_ANOTHER_RANK,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    RuntimeFault,
    SaveFailed,
    SecurityError,
)
from nemo2.base.names import listed
from nemo2.checkpoint.background import BackgroundWrite, Image, Saves
from nemo2.checkpoint.directory import (
    WEIGHTS_PATH,
    Manifest,
    comparing,
    is_loaded,
    missing_context,
    problems,
    publish,
    read_manifest,
    remove,
    saving_to,
    set_aside,
    temporary_name,
    versions,
    write_manifest,
)
from nemo2.checkpoint.foreign_files import refuse_links
from nemo2.checkpoint.leftovers import publish_if_written, record_of, refuse_missing_shards
from nemo2.checkpoint.lineage import own_finished
from nemo2.checkpoint.lock import holds
from nemo2.checkpoint.untrusted import (
    COMMON,
    COMMON_OBJECT,
    data_only,
    read_metadata,
    refuse_code_in_extra_states,
    weights_problem,
)
from nemo2.checkpoint.writer_process import persistently
from nemo2.checkpoint.writing import WatchedSaveStrategy, planning, with_reason
from nemo2.config.capture import configurable
from nemo2.config.notices import warn_without_effect

if TYPE_CHECKING:
    from nemo2.checkpoint.reading import Agree

StorageOptions = dict[str, Any]
_log = logging.getLogger(__name__)
_LITTLE_BYTES = 1 << 26
_WORDS = 400
_Read = TypeVar("_Read")
_REPLACES_ALL = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
_WRITER = re.compile(rf"{WEIGHTS_PATH}/\w*?__(\d+)_\d+\.distcp$")
"""The path of a file that Megatron-Core or torch named after the rank that wrote it."""


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
        """Whether `read_whole` may use an older checkpoint in place of a damaged one. `AutoResume` decides."""
        self._verified: set[Path] = set()
        self._comparing: dict[Path, Callable[[], list[str]]] = {}
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
                ``published``, a function that every rank calls afterwards.

        Raises:
            CheckpointError: the write failed on some rank. The files under the temporary name are deleted, and earlier
                checkpoints are unchanged.
        """
        options = storage_options or {}
        self._publish_some(self._saves.make_room)
        target, attempt = ranks.broadcast((Path(path), uuid.uuid4().hex[:8]))
        temporary = temporary_name(target, attempt)
        files: Optional[list[tuple[Image, str]]] = None
        try:
            create = saving_to(target)(functools.partial((temporary / WEIGHTS_PATH).mkdir, parents=True))
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
        except (Exception, CheckpointException) as error:
            for image, _ in files or ():
                image.give_back(keep=0)
            reason = _known_reason(error)
            if ranks.is_rank_zero():
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise SaveFailed(
                f"Saving {target} failed: {reason}{_room(target)}. The incomplete checkpoint was deleted, "
                "and earlier checkpoints are unchanged."
            ) from error
        if files is None:
            self._finish(temporary, target, options, writing.hashes, None)
            return
        write = BackgroundWrite(target.name, files, self.save_timeout_seconds, str(record_of(temporary, ranks.rank())))

        def publish_written() -> None:
            hashes = {os.path.basename(path): digest for path, digest in write.hashes.items()}
            error = write.error
            if error is not None:
                error = with_reason(error, [path for _, path in write.files]) + _room(target)
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
        """Publish a save. Every rank calls it, with the hashes of its files by name, or its error."""
        outcomes = ranks.gather((_written(temporary, hashes), error))
        failed = [(rank, words) for rank, (_, words) in enumerate(outcomes) if words is not None]
        if failed:
            raise SaveFailed(
                f"Saving {target} in the background failed: on rank {failed[0][0]}, {failed[0][1]}. It was not "
                "published, and earlier checkpoints are unchanged."
            )
        written = [part for part, _ in outcomes]

        def publish_proven() -> None:
            _prove(temporary, written)
            manifest = read_manifest(temporary)
            assert manifest is not None
            publish(temporary, target, manifest, {name: one[1] for part in written for name, one in part.items()})

        _on_rank_zero(publish_proven, target)
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

    def load_checkpoint(
        self,
        path: os.PathLike | str,
        map_location: Any = None,
        weights_only: Optional[bool] = None,
        sharded_state_dict: Optional[dict[str, Any]] = None,
        strict: Optional[str] = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into the shards that ``sharded_state_dict`` describes. Every rank must call it.

        Args:
            path: The checkpoint directory.
            map_location, weights_only: Accepted for Lightning's signature. Pickles are read as data, see `untrusted`.
            sharded_state_dict: The state to load, as ``sharded_state_dict()`` of model and optimizer describe it. None:
                only the plain data.
            strict: Megatron-Core's ``StrictHandling`` ("assume_ok_unexpected", "raise_all", "log_all" ...). None: the
                first.

        Raises:
            CheckpointError: the checkpoint is missing or incomplete, or doesn't fit the model.
            SecurityError: reading the checkpoint would run code.
        """
        from nemo2.checkpoint.reading import direct_reading, load_strategy

        checkpoint = Path(path)
        self.check(checkpoint)
        weights = str(weights_dir(checkpoint))
        with self._with_our_errors(checkpoint) as agree, direct_reading(agree):
            if sharded_state_dict is None:
                return self._plain(checkpoint)
            handling = StrictHandling(strict) if strict else StrictHandling.ASSUME_OK_UNEXPECTED
            if handling not in _REPLACES_ALL:
                # tensors that an older checkpoint lacks would keep the values of the damaged checkpoint
                self._compare(checkpoint)
            strategy = load_strategy(weights, parallel=self.parallel_load)
            _without_absent_extra_states(sharded_state_dict, read_metadata(weights_dir(checkpoint)).state_dict_metadata)
            loaded = dist_checkpointing.load(sharded_state_dict, weights, strategy, strict=handling)
            self._refuse_code(checkpoint, loaded)
            self._compare(checkpoint)
        return loaded[0] if isinstance(loaded, tuple) else loaded

    def check(self, checkpoint: Path) -> None:
        """Check a checkpoint on all ranks before it is read: the names and sizes of all files, and the hashes of files
        without tensors.

        Each rank also starts to hash its share of the files with tensors. `_compare` waits for these hashes.

        Raises:
            DamagedCheckpointError: the checkpoint is missing or incomplete. The same on every rank.
            SecurityError: an entry leads out of the checkpoint's folder.
        """
        begins = self.verify and checkpoint not in self._verified and checkpoint not in self._comparing
        ranks.on_rank_zero(lambda: _refuse_unreadable(checkpoint, hashes=begins), error=CheckpointError)
        if begins:
            manifest = read_manifest(checkpoint) or Manifest(step=0, consumed_samples=0, layout={})
            share = shares(manifest, ranks.world_size())[ranks.rank()]
            self._comparing[checkpoint] = comparing(checkpoint, manifest, share)

    def _compare(self, checkpoint: Path) -> None:
        """Wait for the hashes that `check` started to compare. Every rank must call it before any rank uses the data.

        Raises:
            DamagedCheckpointError: on every rank, if a file of any rank's share differs.
        """
        differing = self._comparing.pop(checkpoint, None)
        if differing is None:
            return
        faults = [problem for part in ranks.gather(differing()) for problem in part]
        if faults:
            raise DamagedCheckpointError(_damaged(checkpoint, faults))
        self._verified.add(checkpoint)

    def _refuse_code(self, checkpoint: Path, loaded: Any) -> None:
        """Raise an error on every rank if some rank read a pickle with more than data, which the model would
        unpickle."""
        refused: Optional[SecurityError] = None
        try:
            refuse_code_in_extra_states(loaded)
        except SecurityError as error:
            refused = error
        try:
            self._all_have_read(checkpoint, refused)
        except DamagedCheckpointError:
            raise
        except CheckpointError as error:
            raise SecurityError(str(error)) from refused

    def _all_have_read(self, checkpoint: Path, error: Optional[BaseException]) -> None:
        """Called by every rank after it has read, with its error if it failed, so that no rank waits for one that
        failed.

        Raises:
            DamagedCheckpointError: on every rank, if one failed and some file differs from what was written.
            CheckpointError: on every rank, if one failed.
        """
        errors = ranks.gather(None if error is None else reason_of(error))
        failed = [f"on rank {rank}, {words}" for rank, words in enumerate(errors) if words is not None]
        if failed:
            self._compare(checkpoint)
            raise CheckpointError(failed[0]) from error

    @contextmanager
    def _with_our_errors(self, checkpoint: Path) -> "Iterator[Agree]":
        """A context for code that reads pickles and tensors of a checkpoint. It yields the function to call after
        reading."""
        refused: list[SecurityError] = []
        try:
            with data_only() as refused:
                yield functools.partial(self._all_have_read, checkpoint)
        except (Exception, CheckpointException) as error:
            if damaged := _damage_in(error):
                raise DamagedCheckpointError(str(damaged)) from error
            if refused or isinstance(error, SecurityError):
                raise SecurityError(f"{checkpoint} was not loaded. {refused[0] if refused else error}") from error
            if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_PEER):
                raise RuntimeFault(
                    f"A rank ended while the ranks were reading {checkpoint}: {reason_of(error)}"
                ) from error
            reason = reason_of(error)
            without = (
                " For its weights alone, set strategy.ckpt_load_optimizer=False." if "optimizer." in reason else ""
            )
            raise CheckpointError(
                f"{checkpoint} cannot be loaded into this model: {reason}. Check that model.config, the tokenizer "
                f"(vocabulary size) and the optimizer match the run that saved it.{without}"
            ) from error

    def _plain(self, checkpoint: Path) -> dict[str, Any]:
        """The state that is not sharded over ranks."""
        from nemo2.checkpoint.reading import intact

        weights = weights_dir(checkpoint)
        # From 0.19 on Megatron-Core stores it in a shard, and hashing a large shard takes long.
        if not (weights / COMMON).is_file() and not all(ranks.gather(intact(weights, COMMON_OBJECT))):
            self._compare(checkpoint)
        common, failure = {}, None
        try:
            common = persistently(dist_checkpointing.load_common_state_dict, str(weights))
        except (Exception, CheckpointException) as error:
            failure = error
        self._all_have_read(checkpoint, failure)
        return common

    def read_whole(self, checkpoint: Path, read: Callable[[Path], _Read]) -> tuple[Path, _Read]:
        """Return ``checkpoint`` and the result of ``read`` for it. Every rank must call it.

        If the checkpoint is damaged and `fall_back` allows it, the newest complete checkpoint before it is read
        instead, and replaces everything that was read. A damaged checkpoint in a directory that this run may write to
        is set aside, so that neither the next run nor retention mistakes it for a good one.

        Raises:
            CheckpointError: the checkpoint is incomplete, and there is no other.
        """
        checkpoint = ranks.broadcast(checkpoint)
        while True:
            try:
                self.check(checkpoint)
                result = read(checkpoint)
            except DamagedCheckpointError as error:
                if not self.fall_back:
                    raise
                older = ranks.on_rank_zero(functools.partial(_before, checkpoint), error=CheckpointError)
                if older is None:
                    raise
                if ranks.is_rank_zero():
                    where = f" It was renamed to {set_aside(checkpoint).name}." if holds(checkpoint.parent) else ""
                    _log.warning("%s%s Falling back to %s.", error, where, older)
                checkpoint = older
            else:
                if ranks.is_rank_zero() and (lost := missing_context(checkpoint)):
                    _log.warning(
                        "%s: %s. Training continues without it, but `generate` and `export` need it.",
                        checkpoint,
                        "; ".join(lost[:3]),
                    )
                return checkpoint, result

    def load_content_metadata(self, path: os.PathLike | str) -> dict[str, Any]:
        """Megatron-Core's settings for sharding the optimizer's state at the time of the save. Empty: unknown."""
        return dist_checkpointing.load_content_metadata(preloaded_state_dict=self.load_checkpoint(path)) or {}

    def remove_checkpoint(self, path: os.PathLike | str) -> None:
        """Delete a checkpoint directory. Only one rank calls it."""
        remove(Path(path))


def _without_absent_extra_states(state: dict[str, Any], stored: Collection[str]) -> None:
    """Empty the extra state of layers for which the checkpoint has none, in place.

    The implementation of a layer decides whether it has an extra state. Without FP8 the state is empty.
    """
    for name, leaf in state.items():
        if isinstance(leaf, dict):
            _without_absent_extra_states(leaf, stored)
        elif isinstance(leaf, ShardedObject) and leaf.key.endswith("._extra_state") and leaf.unique_key not in stored:
            state[name] = LocalNonpersistentObject(None)


def shares(manifest: Manifest, world_size: int) -> list[list[str]]:
    """The files with tensors that each rank hashes during a load.

    A rank hashes the files that its predecessor wrote, because it probably reads the same files and shares the page
    cache. The other files are distributed in turn, largest first.
    """
    by_rank: list[list[str]] = [[] for _ in range(world_size)]
    others = []
    for name in filter(_holds_tensors, manifest.hashes):
        writer = _WRITER.match(name)
        if writer and int(writer[1]) < world_size:
            by_rank[int(writer[1])].append(name)
        else:
            others.append(name)
    for number, name in enumerate(sorted(others, key=lambda name: -manifest.files.get(name, 0))):
        by_rank[number % world_size].append(name)
    return by_rank


def _holds_tensors(name: str) -> bool:
    return name.endswith(".distcp")


def _refuse_unreadable(checkpoint: Path, *, hashes: bool) -> None:
    """Check names and sizes, and with ``hashes`` the contents of small files.

    Raises:
        CheckpointError: a newer Megatron-Core wrote the checkpoint in a form that the installed one cannot read.
        DamagedCheckpointError, SecurityError: the checkpoint can't be read.
    """
    if not checkpoint.is_dir():
        raise DamagedCheckpointError(f"{checkpoint} is not a checkpoint directory.")
    try:
        refuse_links(checkpoint)
        manifest = read_manifest(checkpoint)
        weights = weights_dir(checkpoint)
        if manifest is not None:
            small = [name for name in manifest.hashes if not _holds_tensors(name) and is_loaded(name)]
            faults = problems(checkpoint) or (comparing(checkpoint, manifest, small)() if hashes else [])
        elif (weights / "metadata.json").exists():
            faults = [why] if (why := weights_problem(weights)) else []
        else:
            raise DamagedCheckpointError(
                f"{checkpoint} contains no Megatron-Core checkpoint (no metadata.json in this folder or its weights "
                "folder)."
            )
    except SecurityError as error:
        raise SecurityError(f"{checkpoint} was not loaded. {error}") from error
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error
    if faults:
        raise DamagedCheckpointError(_damaged(checkpoint, faults))
    installed = Version(versions()["megatron-core"])
    if installed.release < (0, 19) and not (weights / COMMON).is_file():
        raise CheckpointError(
            f"{checkpoint} was written with Megatron-Core 0.19 or newer, whose form the installed {installed} cannot read. "
            "Install megatron-core>=0.19, or load it where it was written."
        )


def _known_reason(error: BaseException) -> str:
    """`reason_of` the error. Of Megatron-Core's errors, which every rank raises, some rank's that has a reason."""
    if not isinstance(error, CheckpointException):
        return reason_of(error)
    reasons = ranks.gather(reason_of(error) if error.failures else None)
    return next((reason for reason in reasons if reason is not None), reason_of(error))


def _damage_in(error: BaseException) -> Optional[DamagedCheckpointError]:
    """The error that `_compare` raised, even if torch has wrapped it."""
    if isinstance(error, CheckpointException):
        failures = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
        return next((failure for failure in failures if isinstance(failure, DamagedCheckpointError)), None)
    return error if isinstance(error, DamagedCheckpointError) else None


def _damaged(checkpoint: Path, faults: list[str]) -> str:
    return f"{checkpoint} is damaged: {listed(faults, 5, separator='; ')}. Resume from another checkpoint."


def _before(checkpoint: Path) -> Optional[Path]:
    """The newest other finished checkpoint of the same run, beside this one, that can be resumed."""
    steps = dict(own_finished(checkpoint.parent))
    others = [path for path, manifest in steps.items() if path != checkpoint and not manifest.weights_only]
    own = steps[checkpoint].step if checkpoint in steps else None
    earlier = [path for path in others if own is None or steps[path].step <= own]
    return earlier[-1] if earlier else None


def weights_dir(checkpoint: Path) -> Path:
    """The folder with Megatron-Core's files: ``weights`` inside the checkpoint, or the directory itself."""
    inside = checkpoint / WEIGHTS_PATH
    return inside if inside.is_dir() else checkpoint


def reason_of(error: BaseException) -> str:
    """The error in one line. If several ranks report an error, that of the first rank."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return ON_ANOTHER_RANK
        rank, failure = min(error.failures.items())
        words = reason_of(failure[0] if isinstance(failure, tuple) else failure)
        return words if words.startswith("on rank ") else f"on rank {rank}, {words}"
    words = " ".join(str(error).split()).rstrip(".") or repr(error)
    return words if len(words) <= _WORDS else f"{words[:_WORDS]} ..."


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
        CheckpointError: a file is missing or differs in size.
    """
    for rank, part in enumerate(written):
        for name, (size, _) in part.items():
            seen = _size(temporary / name)
            if seen is None or seen != size:
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
