# SPDX-License-Identifier: Apache-2.0
"""Checkpoint IO for fully sharded models, in the directory layout and file format of all other checkpoints."""

import os
from pathlib import Path
from typing import Any, Optional

import torch
from lightning.fabric.plugins import CheckpointIO
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.directory import sha256, weights_dir
from nemo2.checkpoint.failures import reason_of
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.metadata import COMMON
from nemo2.checkpoint.shards import Shard, load_shards, save_shards
from nemo2.config.capture import configurable


@configurable
class TorchCheckpointIO(MegatronCheckpointIO):
    """Saves and loads lists of `Shard` with torch.distributed.checkpoint, and plain data in Megatron-Core's format.

    A checkpoint is a dictionary of plain data, with the list under "shards" and other named objects under "objects".
    Saving waits until the files are written.
    """

    def __init__(self) -> None:
        super().__init__(async_save=False)

    def _plan(self, checkpoint: dict[str, Any], weights: Path, content_metadata: Optional[dict]) -> Any:
        del content_metadata  # shards record how they were sharded
        writing = _Writing(checkpoint, weights)
        return writing, writing

    def load_into(self, shards: list[Shard], path: os.PathLike | str) -> None:
        """Read the checkpoint into the shards, in place. Every rank calls it.

        Raises:
            CheckpointError: the checkpoint is missing or incomplete, or doesn't fit.
            SecurityError: reading the checkpoint would run code.
        """
        checkpoint = Path(path)
        self.loading.check(checkpoint)
        with self.loading.our_errors(checkpoint) as agree:
            load_shards(shards, weights_dir(checkpoint), agree)
            self.loading.compare(checkpoint)


def torch_checkpoint_io(requested: Optional[CheckpointIO], *, strategy: str) -> TorchCheckpointIO:
    """``requested``, or a new one for None.

    Raises:
        ConfigError: it is of another kind.
    """
    if requested is not None and not isinstance(requested, TorchCheckpointIO):
        raise ConfigError(
            f"strategy.checkpoint_io={type(requested).__name__}: {strategy} requires a TorchCheckpointIO, which writes "
            "parameters that are sharded over data-parallel ranks. Leave checkpoint_io unset, or pass a subclass of "
            "TorchCheckpointIO."
        )
    return requested or TorchCheckpointIO()


class _Writing:
    """The request and the record of one save, in the form of `MegatronCheckpointIO`."""

    def __init__(self, checkpoint: dict[str, Any], weights: Path) -> None:
        self.shards: list[Shard] = checkpoint["shards"]
        self.objects: dict[str, Any] = checkpoint.get("objects", {})
        self.plain = {key: value for key, value in checkpoint.items() if key not in ("shards", "objects")}
        self.weights = weights
        self.hashes: dict[str, str] = {}
        """The SHA-256 of each file that this rank wrote, by name."""

    def execute_sync(self) -> None:
        ranks.on_rank_zero(self._write_plain, error=CheckpointError)
        save_shards(self.shards, self.weights, self.objects)
        self.hashes = {file.name: sha256(file) for file in self.weights.glob(f"__{ranks.rank()}_*.distcp")}

    def _write_plain(self) -> None:
        try:
            torch.save(self.plain, self.weights / COMMON)
            save_config(CheckpointingConfig("torch_dist", 1), str(self.weights))
        except Exception as error:
            raise CheckpointError(f"{self.weights / COMMON} cannot be written: {reason_of(error)}.") from error
