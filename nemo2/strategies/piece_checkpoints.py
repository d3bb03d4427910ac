# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models whose parameters are cut over data-parallel ranks: each rank writes and reads its rows.

Weights stand in the files as Megatron-Core's checkpoints store them, so that they can be read under any other strategy
and layout. The optimizer's state stands beside them under the same names.
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.dist_checkpointing import load_content_metadata
from torch import Tensor

from nemo2.checkpoint.directory import ckpt_to_dir, read_manifest
from nemo2.checkpoint.io import weights_dir
from nemo2.checkpoint.optimizer_forms import into_pieces, scaler_of, step_of
from nemo2.checkpoint.pieces import Piece, padded_to, stored_pieces
from nemo2.checkpoint.random_state import random_state, say_they_start_anew
from nemo2.checkpoint.torch_io import TorchCheckpointIO
from nemo2.checkpoint.untrusted import read_metadata
from nemo2.errors import CheckpointError
from nemo2.parallel.stored_names import StoredRows
from nemo2.strategies.checkpoints import Checkpoints, paddings

Held = tuple[list[StoredRows], Any, Optional[int]]
"""Where a parameter is stored, its tensor (or the optimizer's tensors of it, by their names), and which of its rows the
local one begins with. None: its DTensor knows."""


class PieceCheckpoints(Checkpoints):
    """Save and load pieces through `TorchCheckpointIO`. Made to be subclassed."""

    _load_main_params: bool = False

    @abstractmethod
    def _model_state(self) -> dict[str, Held]:
        """Parameters and buffers by name, on all chunks. Their tensors are the model's, or `_take_up` puts them back."""

    @abstractmethod
    def _optimizer_state(self) -> dict[str, Held]:
        """The same of what the optimizer keeps of each parameter."""

    @abstractmethod
    def _make_optimizer_state(self) -> None:
        """Have the optimizer hold all that a checkpoint is read into."""

    @abstractmethod
    def _optimizer_extras(self) -> dict[str, Any]:
        """Of the optimizer, what is no tensor of a parameter: "step", the updates it has made, and "loss_scaler"."""

    @abstractmethod
    def _load_optimizer_extras(self, extras: Mapping[str, Any]) -> None:
        """Set what `_optimizer_extras` gave, maybe another strategy's."""

    @abstractmethod
    def _stored_objects(self) -> dict[str, Any]:
        """What Megatron-Core stores of the model beside tensors, by name."""

    @abstractmethod
    def _layout_record(self) -> dict[str, Any]:
        """As for all; "strategy" names who wrote it, for only the same can take the optimizer's state over."""

    def _take_up(self, *, model: bool, optimizer: bool) -> None:
        """After reading; for strategies whose state isn't read in place."""

    @property
    def checkpoint_io(self) -> TorchCheckpointIO:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._checkpoint_io  # pyright: ignore[reportReturnType]

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` has read it in place."""
        return False

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, Path], storage_options: Optional[dict[str, Any]] = None
    ) -> None:
        """Save Lightning's ``checkpoint`` with this rank's pieces of model and optimizer. Every rank calls it.

        ``storage_options``: ``published``, ``metrics`` and ``with_context``, see `ModelCheckpoint.save`.
        """
        with_optimizer = "optimizer_states" in checkpoint and self._save_optimizer
        state: dict[str, Any] = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        pieces = self._pieces(optimizer=with_optimizer)
        of_model = (piece.tensor for piece in pieces if not piece.key.startswith("optimizer."))
        self._refuse_what_is_not_finite(of_model, filepath)
        state["pieces"], state["objects"] = pieces, self._stored_objects()
        if with_optimizer:
            state["random_state"] = random_state().data
            state["optimizer_extras"] = self._optimizer_extras()
        state["nemo2"] = self._position()
        options = self._storage_options(storage_options, weights_only=not with_optimizer)
        self.checkpoint_io.save_checkpoint(state, ckpt_to_dir(filepath), storage_options=options)

    def _pieces(self, *, model: bool = True, optimizer: bool) -> list[Piece]:
        """This rank's pieces of the model and of the optimizer's state."""
        pieces: list[Piece] = []
        for stored, value, first_row in (self._model_state() if model else {}).values():
            pieces += stored_pieces(stored, value, first_row=first_row)
        for name, (stored, held, first_row) in (self._optimizer_state() if optimizer else {}).items():
            for kind, value in held.items():
                if not isinstance(value, Tensor):
                    continue
                # What counts steps has no rows: it is stored under the parameter's own name.
                own = stored if value.dim() else [replace(stored[0], key=f"module.{name}")]
                pieces += stored_pieces(own, value, prefix=f"optimizer.state.{kind}.", first_row=first_row)
        return pieces

    def load_checkpoint(self, checkpoint_path: Union[str, Path], weights_only: Optional[bool] = None) -> dict[str, Any]:
        """Read a checkpoint in place: the model and, when fitting, the optimizer. Returns the plain data.

        Raises:
            CheckpointError: it can't be read, or holds no optimizer state that this strategy can take over.
        """
        read = functools.partial(self._read, optimizer=self.trainer.state.fn == TrainerFn.FITTING)
        return self.checkpoint_io.read_whole(Path(checkpoint_path), read)

    def _read(self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False) -> dict[str, Any]:
        plain = self.checkpoint_io.load_plain(path)
        manifest = read_manifest(path)
        optimizer = optimizer and self._load_optimizer and not (manifest is not None and manifest.weights_only)
        extras: dict[str, Any] = {}
        if optimizer:
            extras = self._extras_in(plain, path)
            self._make_optimizer_state()
        pieces = self._pieces(model=model, optimizer=optimizer)
        stored = read_metadata(weights_dir(path)).state_dict_metadata
        lacking = self._lacking(path, stored) if base else frozenset()
        pieces = [piece for piece in pieces if piece.key not in lacking]
        if optimizer or self._load_main_params:
            pieces = into_pieces(pieces, stored.keys())
        rows = {stored[piece.key].size[0] for piece in pieces if piece.padded and piece.key in stored}
        for there in rows & paddings(self.lightning_module, manifest):
            pieces = padded_to(pieces, there)
        self.checkpoint_io.load_into(pieces, path)
        self._take_up(model=model, optimizer=optimizer)
        if optimizer:
            self._load_optimizer_extras(extras)
        if not optimizer or manifest is None or manifest.layout != self._layout_record():
            plain.pop("random_state", None)
            if optimizer and self.trainer.ckpt_path:
                say_they_start_anew(path)
        return plain

    def _extras_in(self, plain: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """What stands beside the optimizer's tensors in a checkpoint of any strategy.

        Raises:
            CheckpointError: it was saved so that only its own layout can read it, or by an optimizer of the user's own.
        """
        if "optimizer_extras" in plain:
            return plain["optimizer_extras"]
        saved, why = plain.get("optimizer"), ""
        metadata = load_content_metadata(preloaded_state_dict=dict(plain)) or {}
        if saved is None:
            why = "holds no optimizer state of Megatron-Core's"
        elif metadata.get("distrib_optim_sharding_type", "fully_reshardable") != "fully_reshardable":
            why = "was saved with strategy.ckpt_parallel_save_optim=False, for its own layout only"
        if why:
            raise CheckpointError(
                f"{path} {why}: {type(self).__name__} can't take its optimizer state over; the weights it can. Set "
                "strategy.ckpt_load_optimizer=False, or start a new run from them with resume.restore_config."
            )
        return {"step": step_of(saved), "loss_scaler": scaler_of(saved) or {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Random streams and the position in the data; the tensors have been read in place."""
        self._take_up_position(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has read it in place."""
