# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `MegatronStrategy`: Megatron-Core's sharded state, and with Megatron-FSDP the rows that each rank holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Optional, Union, cast

from torch import nn

from nemo2.checkpoint.directory import read_manifest
from nemo2.checkpoint.optimizer_forms import set_steps, steps_done, torch_optimizers
from nemo2.errors import CheckpointError
from nemo2.optim.megatron import MegatronOptimizer
from nemo2.parallel.fsdp import MegatronFSDPChunk
from nemo2.strategies.megatron_checkpoints import CheckpointingStrategy
from nemo2.strategies.piece_checkpoints import Held, PieceCheckpoints


class MegatronFSDPCheckpoints(CheckpointingStrategy, PieceCheckpoints):
    """What `CheckpointingStrategy` does, unless the model is cut by Megatron-FSDP. Made to be subclassed.

    Megatron-Core's own format for it ("fsdp_dtensor") knows nothing of layers stacked under one name, so that nothing else
    could read it.
    """

    fsdp: Optional[Literal["megatron", "pytorch"]]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, Path], storage_options: Optional[dict[str, Any]] = None
    ) -> None:
        kind = PieceCheckpoints if self.fsdp else CheckpointingStrategy
        kind.save_checkpoint(self, checkpoint, filepath, storage_options)

    def _read(self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False) -> dict[str, Any]:
        if self.fsdp:
            return PieceCheckpoints._read(self, path, optimizer=optimizer, model=model, base=base)
        manifest = read_manifest(path)
        written_by = manifest.layout.get("strategy") if manifest is not None and not manifest.weights_only else None
        own = [item for item in self.optimizers if not isinstance(item, MegatronOptimizer)]
        if written_by and optimizer and self._load_optimizer and own:
            raise CheckpointError(
                f"{path} was saved under {written_by}, whose optimizer state {type(own[0]).__name__} of this module can't take "
                "over under MegatronStrategy; the weights it can. Set strategy.ckpt_load_optimizer=False, or start a new run "
                "from them with resume.restore_config."
            )
        return super()._read(path, optimizer=optimizer, model=model, base=base)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        kind = PieceCheckpoints if self.fsdp else CheckpointingStrategy
        kind.load_model_state_dict(self, checkpoint, strict)

    def _layout_record(self) -> dict[str, Any]:
        record = super()._layout_record()
        return record | {"strategy": "MegatronStrategy(fsdp='megatron')"} if self.fsdp else record

    # ------------------------------------------------------------------------------------------------- of Megatron-FSDP

    @property
    def _chunks(self) -> list[MegatronFSDPChunk]:
        assert self.megatron_parallel is not None
        return cast(list[MegatronFSDPChunk], list(self.megatron_parallel))

    def _model_state(self) -> dict[str, Held]:
        state: dict[str, Held] = {}
        for index, chunk in enumerate(self._chunks):
            trained = chunk.main_parameters()
            for name, stored in chunk.stored.items():
                if name in trained:
                    value, first_row = trained[name]
                    state[f"{index}.{name}"] = (stored, value, first_row)
                elif name in (buffers := dict(cast(nn.Module, chunk.core).named_buffers())):
                    state[f"{index}.{name}"] = (stored, buffers[name], None)
        return state

    def _optimizer_state(self) -> dict[str, Held]:
        held = self._megatron_optimizer.state
        return {
            name: (stored, held[value], first_row)
            for name, (stored, value, first_row) in self._model_state().items()
            if value in held
        }

    @property
    def _megatron_optimizer(self) -> MegatronOptimizer:
        optimizer = self.optimizers[0]
        assert isinstance(optimizer, MegatronOptimizer)
        return optimizer

    @property
    def _chained_optimizers(self) -> list[Any]:
        whole = self._megatron_optimizer.mcore_optimizer
        return getattr(whole, "chained_optimizers", [whole])

    @property
    def _torch_optimizers(self) -> list[Any]:
        return torch_optimizers(self._megatron_optimizer.mcore_optimizer)

    def _make_optimizer_state(self) -> None:
        for optimizer in self._chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()

    def _optimizer_extras(self) -> dict[str, Any]:
        """Scheduled hyperparameters are set anew by the run."""
        scaler = getattr(self._megatron_optimizer.mcore_optimizer, "grad_scaler", None)
        return {
            "step": steps_done(self._torch_optimizers),
            "loss_scaler": scaler.state_dict() if scaler is not None else {},
        }

    def _load_optimizer_extras(self, extras: Mapping[str, Any]) -> None:
        set_steps(self._torch_optimizers, extras.get("step"))
        scaler = getattr(self._megatron_optimizer.mcore_optimizer, "grad_scaler", None)
        if scaler is not None and extras.get("loss_scaler"):
            scaler.load_state_dict(extras["loss_scaler"])

    def _added_keys(self) -> frozenset[str]:
        if not self.fsdp:
            return super()._added_keys()
        return frozenset(key for chunk in self._chunks for key in chunk.added)

    def _stored_objects(self) -> dict[str, Any]:
        return {key: value for chunk in self._chunks for key, value in chunk.objects.items()}

    def _take_up(self, *, model: bool, optimizer: bool) -> None:
        if model:
            for chunk in self._chunks:
                chunk.install_main_parameters()
