# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed checkpoints behind Lightning's CheckpointIO.

Megatron-Core decides what is written where and how it is cut anew on loading; this decides under which name, when the
result counts, and what goes with it.
"""

import inspect
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from lightning.fabric.plugins import CheckpointIO
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from nemo2.checkpoint.directory import MANIFEST, WEIGHTS_PATH, Manifest, problems, publish, remove, temporary_name
from nemo2.config.capture import configurable
from nemo2.errors import CheckpointError, ConfigError

StorageOptions = dict[str, Any]


@configurable
class MegatronCheckpointIO(CheckpointIO):
    """Saves and loads ``weights/`` in Megatron-Core's ``torch_dist`` format, which any layout can read.

    Args:
        save_ckpt_format: "torch_dist".
        load_directly_on_device: Kept for NeMo's signature; Megatron-Core reads into the tensors it is given.
        async_save: Write in the background; training goes on after the copy. The checkpoint exists once
            `maybe_finalize_save_checkpoint` has found the writing done on every rank.
        torch_dist_multiproc: Writer processes per rank. None: Megatron-Core's choice (2).
        assume_constant_structure: The state's structure never changes: plan the writing once.
        parallel_save: Replicas share the writing, each a part.
        parallel_save_within_dp: Share it within a data-parallel group only.
        parallel_load: Replicas share the reading and send each other what they read.
    """

    def __init__(
        self,
        save_ckpt_format: Literal["torch_dist"] = "torch_dist",
        load_directly_on_device: bool = True,
        async_save: bool = False,
        torch_dist_multiproc: Optional[int] = None,
        assume_constant_structure: bool = False,
        parallel_save: bool = True,
        parallel_save_within_dp: bool = False,
        parallel_load: bool = True,
    ) -> None:
        if save_ckpt_format != "torch_dist":
            raise ConfigError(
                f"strategy.save_ckpt_format={save_ckpt_format!r}: Megatron-Core has dropped the other formats; use 'torch_dist'."
            )
        self.save_ckpt_format = save_ckpt_format
        self.load_directly_on_device = load_directly_on_device
        self.async_save = async_save
        self.torch_dist_multiproc = torch_dist_multiproc
        self.assume_constant_structure = assume_constant_structure
        self.parallel_save = parallel_save
        self.parallel_save_within_dp = parallel_save_within_dp
        self.parallel_load = parallel_load
        self._queue: Optional[AsyncCallsQueue] = None
        self._validated = False

    # ------------------------------------------------------------------------------------------------------ saving

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: os.PathLike | str, storage_options: Optional[StorageOptions] = None
    ) -> None:
        """Write ``checkpoint`` (sharded tensors and plain data) as the checkpoint directory ``path``. Every rank calls it.

        Args:
            checkpoint: What Megatron-Core saves: sharded tensors and objects, and plain data equal on all ranks.
            path: The directory that exists once the save is done.
            storage_options: ``manifest`` (`Manifest`, required); ``content_metadata`` for Megatron-Core; ``write_context``, a
                function of a directory that rank 0 calls before the checkpoint is published; ``published``, a function that
                every rank calls after it.

        Raises:
            CheckpointError: the writing failed on some rank. What was written under the temporary name is deleted, and
                earlier checkpoints are untouched.
        """
        options = storage_options or {}
        target = Path(path)
        temporary = temporary_name(target, _agree(uuid.uuid4().hex[:8]))
        finish = self._finisher(temporary, target, options)
        try:
            self._prepare(temporary, target)
            request = self._write(checkpoint, temporary / WEIGHTS_PATH, options.get("content_metadata"))
        except (Exception, CheckpointException) as error:
            if _is_rank_zero():
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"Saving {target} failed: {_reason(error)}. Nothing of it was kept; earlier checkpoints are untouched."
            ) from error
        if request is None:
            finish()
            return
        request.add_finalize_fn(finish)
        self._queue = self._queue or AsyncCallsQueue()
        self._queue.schedule_async_request(request)

    def _prepare(self, temporary: Path, target: Path) -> None:
        """Make the temporary directory on rank 0; a failure there is an error everywhere."""
        problem = None
        if _is_rank_zero():
            try:
                (temporary / WEIGHTS_PATH).mkdir(parents=True)
            except OSError as error:
                problem = (
                    f"Can't write {target}: {error.strerror or error}. Make the directory writable, or set log.log_dir."
                )
        problem = _agree(problem)
        if problem:
            raise CheckpointError(problem)

    def _write(self, checkpoint: dict[str, Any], weights: Path, content_metadata: Optional[dict]) -> Any:
        arguments: dict[str, Any] = {
            "validate_access_integrity": not self._validated,
            "async_sharded_save": self.async_save,
            "content_metadata": content_metadata,
        }
        if self.async_save and "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            arguments["async_strategy"] = "mcore"  # the other choice needs nvidia-resiliency-ext
        request = dist_checkpointing.save(checkpoint, str(weights), self._save_strategy(), **arguments)
        self._validated = True  # the same structure every time
        return request

    def _save_strategy(self) -> Any:
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        writers: dict[str, Any] = (
            {} if self.torch_dist_multiproc is None else {"thread_count": self.torch_dist_multiproc}
        )
        strategy = TorchDistSaveShardedStrategy(
            "torch_dist", 1, cached_metadata=self.assume_constant_structure, **writers
        )
        if self.parallel_save:
            return FullyParallelSaveStrategyWrapper(strategy, self._save_group(), self.assume_constant_structure)
        return strategy

    def _save_group(self) -> Any:
        if not self.parallel_save_within_dp:
            return None
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def _finisher(self, temporary: Path, target: Path, options: StorageOptions) -> Callable[[], None]:
        manifest: Manifest = options["manifest"]

        def finish() -> None:
            problem = None
            if _is_rank_zero():
                try:
                    if options.get("write_context") is not None:
                        options["write_context"](temporary)
                    publish(temporary, target, manifest)
                except Exception as error:  # whatever it is: the other ranks wait for the verdict
                    reason = error.strerror if isinstance(error, OSError) else None
                    problem = f"Publishing {target} failed: {reason or error!r}."
            problem = _agree(problem)
            if problem:
                raise CheckpointError(problem)
            if options.get("published") is not None:
                options["published"](target)

        return finish

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> bool:
        """Publish background saves that have been written on every rank. Every rank calls it, at the same steps.

        Args:
            blocking: Wait for all of them.

        Returns:
            Whether a checkpoint was published.
        """
        if self._queue is None or not self._queue.get_num_unfinalized_calls():
            return False
        return bool(self._queue.maybe_finalize_async_calls(blocking=blocking))

    def abandon(self) -> None:
        """Forget background saves that aren't published; no other rank is asked."""
        self._queue = None

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
        """Read a checkpoint into the cut that ``sharded_state_dict`` describes. Every rank calls it.

        Args:
            path: The checkpoint directory.
            map_location, weights_only: Kept for Lightning's signature; nothing is unpickled beyond what Megatron-Core's
                format needs.
            sharded_state_dict: What to load, as ``sharded_state_dict()`` of model and optimizer describe it. None: only the
                plain data.
            strict: Megatron-Core's ``StrictHandling`` ("assume_ok_unexpected", "raise_all", "log_all" ...). None: the first.

        Raises:
            CheckpointError: it isn't there, isn't whole, or doesn't fit the model.
        """
        checkpoint = Path(path)
        self.check(checkpoint)
        weights = weights_dir(checkpoint)
        try:
            if sharded_state_dict is None:
                return dist_checkpointing.load_common_state_dict(str(weights))
            handling = StrictHandling(strict) if strict else StrictHandling.ASSUME_OK_UNEXPECTED
            loaded = dist_checkpointing.load(
                sharded_state_dict, str(weights), self._load_strategy(str(weights)), strict=handling
            )
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{checkpoint} can't be loaded into this model: {_reason(error)}. Check that model.config, the tokenizer "
                "(vocabulary size) and the optimizer are those it was saved with."
            ) from error
        return loaded[0] if isinstance(loaded, tuple) else loaded

    def check(self, checkpoint: Path) -> None:
        """Refuse a checkpoint that isn't there or isn't whole, with the same error on every rank."""
        problem = _agree(_unreadable(checkpoint) if _is_rank_zero() else None)
        if problem:
            raise CheckpointError(problem)

    def _load_strategy(self, weights: str) -> Any:
        from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy

        strategy = get_default_load_sharded_strategy(weights)
        return FullyParallelLoadStrategyWrapper(strategy, None) if self.parallel_load else strategy

    def load_content_metadata(self, path: os.PathLike | str) -> dict[str, Any]:
        """How the optimizer's state was cut when it was saved; {} for a checkpoint that doesn't say."""
        return dist_checkpointing.load_content_metadata(str(weights_dir(Path(path)))) or {}

    def remove_checkpoint(self, path: os.PathLike | str) -> None:
        """Delete a checkpoint directory. One rank calls it."""
        remove(Path(path))


def _unreadable(checkpoint: Path) -> Optional[str]:
    if not checkpoint.is_dir():
        return f"{checkpoint} is not a checkpoint directory."
    try:
        if (checkpoint / MANIFEST).is_file():
            found = problems(checkpoint)
            return (
                f"{checkpoint} is damaged: {'; '.join(found[:5])}. Resume from another checkpoint." if found else None
            )
    except CheckpointError as error:
        return str(error)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(weights_dir(checkpoint))):
        return f"{checkpoint} holds no Megatron-Core checkpoint (no metadata.json in it or in its weights folder)."
    return None


def weights_dir(checkpoint: Path) -> Path:
    """The folder with Megatron-Core's files: ``weights`` inside, or the directory itself."""
    inside = checkpoint / WEIGHTS_PATH
    return inside if inside.is_dir() else checkpoint


def _reason(error: BaseException) -> str:
    """One line; of what several ranks report, the first rank's."""
    if isinstance(error, CheckpointException):
        if not error.failures:
            return "on another rank, which says why"
        rank, failure = min(error.failures.items())
        error = failure[0] if isinstance(failure, tuple) else failure
        return f"on rank {rank}, {_reason(error)}"
    return " ".join(str(error).split()).rstrip(".") or repr(error)


def _is_rank_zero() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
