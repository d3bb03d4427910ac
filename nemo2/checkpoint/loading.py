# SPDX-License-Identifier: Apache-2.0
"""Loads Megatron-Core's distributed checkpoints: compares every file with the manifest, reads pickles as data, and raises one
error on all ranks."""

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, TypeVar

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling
from packaging.version import Version
from torch.distributed.checkpoint.api import CheckpointException

from nemo2.base import ranks
from nemo2.base.errors import LOST_PEER, CheckpointError, DamagedCheckpointError, RuntimeFault, SecurityError
from nemo2.base.names import listed
from nemo2.checkpoint.directory import (
    WEIGHTS_PATH,
    Manifest,
    comparing,
    is_loaded,
    problems,
    read_manifest,
    set_aside,
    versions,
    weights_dir,
)
from nemo2.checkpoint.failures import reason_of
from nemo2.checkpoint.foreign_files import refuse_links
from nemo2.checkpoint.lineage import own_finished
from nemo2.checkpoint.lock import holds
from nemo2.checkpoint.metadata import COMMON, COMMON_OBJECT, read_metadata, weights_problem
from nemo2.checkpoint.reading import Agree, direct_reading, intact, load_strategy
from nemo2.checkpoint.untrusted import data_only, refuse_code_in_extra_states
from nemo2.checkpoint.writer_process import persistently

_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")
_REPLACES_ALL = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
_WRITER = re.compile(rf"{WEIGHTS_PATH}/\w*?__(\d+)_\d+\.distcp$")
"""The path of a file that Megatron-Core or torch named after the rank that wrote it."""


class Loading:
    """Loads the checkpoints of one run. It remembers the files that it has compared.

    Args:
        verify: Compare every file's SHA-256 with the manifest.
        parallel: Distribute the reading over replicas, which then exchange the tensors.
    """

    def __init__(self, *, verify: bool, parallel: bool) -> None:
        self._verify = verify
        self._parallel = parallel
        self._verified: set[Path] = set()
        self._comparing: dict[Path, Callable[[], list[str]]] = {}

    def load(
        self, checkpoint: Path, sharded_state_dict: Optional[dict[str, Any]] = None, strict: Optional[str] = None
    ) -> dict[str, Any]:
        """Read a checkpoint into the shards that ``sharded_state_dict`` describes. Every rank must call it.

        Args:
            checkpoint: Its directory.
            sharded_state_dict: The state to load, as ``sharded_state_dict()`` of model and optimizer describe it. None:
                only the plain data.
            strict: Megatron-Core's ``StrictHandling`` ("assume_ok_unexpected", "raise_all", "log_all" ...). None: the
                first.

        Raises:
            CheckpointError: the checkpoint is missing or incomplete, or doesn't fit the model.
            SecurityError: reading the checkpoint would run code.
        """
        self.check(checkpoint)
        weights = str(weights_dir(checkpoint))
        with self.our_errors(checkpoint) as agree, direct_reading(agree):
            if sharded_state_dict is None:
                return self._plain(checkpoint)
            handling = StrictHandling(strict) if strict else StrictHandling.ASSUME_OK_UNEXPECTED
            if handling not in _REPLACES_ALL:
                # tensors that an older checkpoint lacks would keep the values of the damaged checkpoint
                self.compare(checkpoint)
            strategy = load_strategy(weights, parallel=self._parallel)
            _without_absent_extra_states(sharded_state_dict, read_metadata(weights_dir(checkpoint)).state_dict_metadata)
            loaded = dist_checkpointing.load(sharded_state_dict, weights, strategy, strict=handling)
            self._refuse_code(checkpoint, loaded)
            self.compare(checkpoint)
        return loaded[0] if isinstance(loaded, tuple) else loaded

    def check(self, checkpoint: Path) -> None:
        """Check a checkpoint on all ranks before it is read: the names and sizes of all files, and the hashes of files
        without tensors.

        Each rank also starts to hash its share of the files with tensors. `compare` waits for these hashes.

        Raises:
            DamagedCheckpointError: the checkpoint is missing or incomplete. The same on every rank.
            SecurityError: an entry leads out of the checkpoint's folder.
        """
        begins = self._verify and checkpoint not in self._verified and checkpoint not in self._comparing
        ranks.on_rank_zero(lambda: _refuse_unreadable(checkpoint, hashes=begins), error=CheckpointError)
        if begins:
            manifest = read_manifest(checkpoint) or Manifest(step=0, consumed_samples=0, layout={})
            share = shares(manifest, ranks.world_size())[ranks.rank()]
            self._comparing[checkpoint] = comparing(checkpoint, manifest, share)

    def compare(self, checkpoint: Path) -> None:
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
            self.compare(checkpoint)
            raise CheckpointError(failed[0]) from error

    @contextmanager
    def our_errors(self, checkpoint: Path) -> Iterator[Agree]:
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
        weights = weights_dir(checkpoint)
        # From 0.19 on Megatron-Core stores it in a shard, and hashing a large shard takes long.
        if not (weights / COMMON).is_file() and not all(ranks.gather(intact(weights, COMMON_OBJECT))):
            self.compare(checkpoint)
        common, failure = {}, None
        try:
            common = persistently(dist_checkpointing.load_common_state_dict, str(weights))
        except (Exception, CheckpointException) as error:
            failure = error
        self._all_have_read(checkpoint, failure)
        return common

    def read_whole(self, checkpoint: Path, read: Callable[[Path], _Read], *, fall_back: bool) -> tuple[Path, _Read]:
        """Return ``checkpoint`` and the result of ``read`` for it. Every rank must call it.

        If the checkpoint is damaged, with ``fall_back`` the newest complete checkpoint before it is read
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
                if not fall_back:
                    raise
                older = ranks.on_rank_zero(functools.partial(_before, checkpoint), error=CheckpointError)
                if older is None:
                    raise
                if ranks.is_rank_zero():
                    where = f" It was renamed to {set_aside(checkpoint).name}." if holds(checkpoint.parent) else ""
                    _log.warning("%s%s Falling back to %s.", error, where, older)
                checkpoint = older
            else:
                if ranks.is_rank_zero() and (lost := problems(checkpoint, of_context=True)):
                    _log.warning(
                        "%s: %s. Training continues without it, but `generate` and `export` need it.",
                        checkpoint,
                        "; ".join(lost[:3]),
                    )
                return checkpoint, result


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


def _damage_in(error: BaseException) -> Optional[DamagedCheckpointError]:
    """The error that `compare` raised, even if torch has wrapped it."""
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
