# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of fully sharded models, in the directory layout and the file format of the others."""

import os
import pathlib
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from nemo2.checkpoint.directory import WEIGHTS_PATH, sha256
from nemo2.checkpoint.io import MegatronCheckpointIO, reason_of, weights_dir
from nemo2.checkpoint.pieces import Piece, load_pieces, save_pieces
from nemo2.checkpoint.untrusted import COMMON
from nemo2.config.capture import configurable
from nemo2.errors import CheckpointError


@configurable
class TorchCheckpointIO(MegatronCheckpointIO):
    """Saves and loads `Piece` lists with torch.distributed.checkpoint, beside plain data as Megatron-Core keeps them.

    A checkpoint is a dictionary of plain data with the list under "pieces", and what else is stored by name under
    "objects". Saving waits for the writing.
    """

    def __init__(self) -> None:
        super().__init__(async_save=False)

    def _plan(self, checkpoint: dict[str, Any], weights: Path, content_metadata: Optional[dict]) -> Any:
        del content_metadata  # pieces record how they were sharded
        writing = _Writing(checkpoint, weights)
        return writing, writing

    def load_plain(self, path: os.PathLike | str) -> dict[str, Any]:
        """State that is not sharded over ranks.

        Raises:
            CheckpointError: it isn't there, or holds objects that plain data don't.
        """
        checkpoint = Path(path)
        self.check(checkpoint)
        if not (weights_dir(checkpoint) / COMMON).is_file():
            return self.load_checkpoint(checkpoint)  # saved by Megatron-Core from 0.19 on
        safe = [pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath]
        try:
            with torch.serialization.safe_globals(safe):
                return torch.load(weights_dir(checkpoint) / COMMON, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint / WEIGHTS_PATH / COMMON} cannot be read: {reason_of(error)}."
            ) from error

    def load_into(self, pieces: list[Piece], path: os.PathLike | str) -> None:
        """Read the checkpoint into the pieces, in place. Every rank calls it.

        Raises:
            CheckpointError: it isn't there, isn't whole, or doesn't fit.
            SecurityError: reading it would run code.
        """
        checkpoint = Path(path)
        self.check(checkpoint)
        with self._told_in_our_words(checkpoint) as agree:
            load_pieces(pieces, weights_dir(checkpoint), agree)
            self._compare(checkpoint)


class _Writing:
    """The request and the record of one save, in the form of `MegatronCheckpointIO`."""

    def __init__(self, checkpoint: dict[str, Any], weights: Path) -> None:
        self.pieces: list[Piece] = checkpoint["pieces"]
        self.objects: dict[str, Any] = checkpoint.get("objects", {})
        self.plain = {key: value for key, value in checkpoint.items() if key not in ("pieces", "objects")}
        self.weights = weights
        self.hashes: dict[str, str] = {}
        """SHA-256 of each file this rank wrote, by its name."""

    def execute_sync(self) -> None:
        rank = torch.distributed.get_rank()
        problem: list[Any] = [None]
        if rank == 0:
            try:
                torch.save(self.plain, self.weights / COMMON)
                save_config(CheckpointingConfig("torch_dist", 1), str(self.weights))
            except Exception as error:  # any error: the other ranks wait for the result
                problem = [reason_of(error)]
        torch.distributed.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise CheckpointError(f"{self.weights / COMMON} cannot be written: {problem[0]}.")
        save_pieces(self.pieces, self.weights, self.objects)
        self.hashes = {file.name: sha256(file) for file in self.weights.glob(f"__{rank}_*.distcp")}
