# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of parameters that are sharded over data-parallel ranks: each rank writes and reads its rows.

The files hold weights in the form of Megatron-Core's checkpoints, so that any other strategy and layout can read them.
The optimizer's state is beside them under the same names.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron.core.dist_checkpointing import load_content_metadata
from torch import Tensor

from nemo2.checkpoint.directory import read_manifest, weights_dir
from nemo2.checkpoint.forms.form import OWN_LAYOUT_ONLY, RESHARDABLE, SHARDING, Form, paddings
from nemo2.checkpoint.metadata import read_metadata
from nemo2.checkpoint.optimizer_forms import into_shards, refuse_nemo, scaler_of, set_steps, step_of, steps_done
from nemo2.checkpoint.random_state import own_random_state, random_states, report_new_random_streams
from nemo2.checkpoint.shards import Shard, padded_to, stored_shards
from nemo2.checkpoint.torch_io import TorchCheckpointIO
from nemo2.mcore.parallel.stored_names import StoredChunk, StoredRows, rows_by_layer


class LocalShard(NamedTuple):
    """A parameter, or the optimizer's state of it."""

    stored: list[StoredRows]
    value: Any
    """The parameter's tensor, or the optimizer's tensors for it by name."""
    first_row: Optional[int] = None
    """The parameter's row with which the local tensor begins. None: the DTensor's own."""
    name: str = ""
    """The name in the whole model."""
    trained: bool = True

    @classmethod
    def of(cls, chunk: StoredChunk, name: str, value: Any, first_row: Optional[int] = None) -> "LocalShard":
        """The parameter ``name`` of a chunk, or the optimizer's state of it."""
        return cls(chunk.stored[name], value, first_row, chunk.full_names[name], name in chunk.trained)


class ShardedForm(Form):
    """Base class of forms with shards, which `TorchCheckpointIO` writes. Subclasses know where parameters and states
    are."""

    @property
    @abstractmethod
    def chunks(self) -> list[StoredChunk]:
        """The stored form of this rank's chunks of the model, determined before sharding."""

    @abstractmethod
    def model_state(self) -> dict[str, LocalShard]:
        """Parameters and buffers of all chunks by name. The tensors are the model's, or `finish_reading` writes them back."""

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """The strategy's optimizer, whose ``state`` has that of each parameter. Its ``make_state`` creates that of parameters
        that it has not updated yet: a checkpoint holds and is read into the state of all."""

    @property
    @abstractmethod
    def torch_optimizers(self) -> list[Any]:
        """The torch optimizers inside it."""

    @property
    @abstractmethod
    def scaler(self) -> Any:
        """Its loss scaler. None: it has none."""

    def optimizer_states(self) -> dict[str, LocalShard]:
        """The optimizer's state of each parameter, by the names of `model_state`."""
        state = self.optimizer.state
        return {
            name: one._replace(value=state[one.value]) for name, one in self.model_state().items() if one.value in state
        }

    def optimizer_extras(self) -> dict[str, Any]:
        """The optimizer's values that are no tensors of a parameter: "step", the number of updates, and
        "loss_scaler". The run sets scheduled hyperparameters again."""
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        return {"step": steps_done(self.torch_optimizers), "loss_scaler": scaler}

    def load_optimizer_extras(self, extras: Mapping[str, Any]) -> None:
        """Set the values of `optimizer_extras`, possibly from another strategy."""
        set_steps(self.torch_optimizers, extras.get("step"))
        if self.scaler is not None and extras.get("loss_scaler"):
            self.scaler.load_state_dict(extras["loss_scaler"])

    def stored_objects(self) -> dict[str, Any]:
        """Entries of the model that Megatron-Core stores beside tensors, by name."""
        return {key: value for chunk in self.chunks for key, value in chunk.objects.items()}

    def added_keys(self) -> frozenset[str]:
        return frozenset().union(*(chunk.added for chunk in self.chunks))

    def finish_reading(self, *, model: bool, optimizer: bool) -> None:
        pass  # read in place

    def model_shards(self) -> list[Shard]:
        return self.shards(optimizer=False)

    @property
    def io(self) -> TorchCheckpointIO:
        return self.owner.checkpoint_io

    def parameters(self) -> Iterable[Tensor]:
        return [shard.tensor for shard in self.shards(optimizer=False)]

    def state(self, *, optimizer: bool) -> dict[str, Any]:
        if optimizer and self.save_optimizer:
            self.optimizer.make_state()
        state: dict[str, Any] = {"shards": self.shards(optimizer=optimizer, part=self.part is not None)}
        state["objects"] = self.stored_objects() if self.part is None else {}
        if optimizer:
            state["random_state"] = random_states()
            state["optimizer_extras"] = self.optimizer_extras()
        return state

    def shards(
        self, *, model: bool = True, optimizer: bool, part: bool = False, all_layers: bool = False
    ) -> list[Shard]:
        """This rank's shards of the model and of the optimizer's state.

        Args:
            part: Only the shards that the form saves.
            all_layers: All shards, stored layer by layer like those of a part.
        """
        shards: list[Shard] = []
        apart = part or all_layers
        for held in (self.model_state() if model else {}).values():
            if not part or self.keeps(held.name, held.trained):
                stored = rows_by_layer(held.stored) if apart else held.stored
                shards += stored_shards(stored, held.value, first_row=held.first_row)
        for name, held in (self.optimizer_states() if optimizer else {}).items():
            for kind, value in held.value.items():
                if not isinstance(value, Tensor):
                    continue
                stored = rows_by_layer(held.stored) if apart else held.stored
                # A counter of steps has no rows: it is stored under the parameter's own name.
                own = stored if value.dim() else [replace(stored[0], key=f"module.{name}")]
                shards += stored_shards(own, value, prefix=f"optimizer.state.{kind}.", first_row=held.first_row)
        return shards

    def read_whole(
        self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False, part: bool = False
    ) -> dict[str, Any]:
        plain = self.io.load_checkpoint(path)
        manifest = read_manifest(path)
        resumes, same_layout = optimizer, manifest is not None and manifest.layout == self.layout_record()
        optimizer = optimizer and self.load_optimizer and not (manifest is not None and manifest.weights_only)
        extras: dict[str, Any] = {}
        if optimizer:
            extras = self._extras_in(plain, path)
            self.optimizer.make_state()
        shards = self.shards(model=model, optimizer=optimizer, all_layers=part)
        stored = read_metadata(weights_dir(path)).state_dict_metadata
        if optimizer:
            self.warn_of_unused_state(path, stored, (shard.key for shard in shards))
        if part:
            here = {shard.key for shard in shards if not shard.key.startswith("optimizer.")}
            left_out = here - self.part_in(path, stored, here)
        else:
            left_out = self.lacking(path, stored) if base else frozenset()
        shards = [shard for shard in shards if shard.key not in left_out]
        if optimizer or self.load_main_params:
            shards = into_shards(shards, stored.keys())
        rows = {stored[shard.key].size[0] for shard in shards if shard.padded and shard.key in stored}
        for there in rows & paddings(self.owner.lightning_module, manifest):
            shards = padded_to(shards, there)
        self.io.load_into(shards, path)
        self.finish_reading(model=model, optimizer=optimizer)
        if model:
            self.report_loaded_keys({shard.key for shard in shards})
        if optimizer:
            self.load_optimizer_extras(extras)
        saved = plain.pop("random_state", {})
        streams = own_random_state(saved) if resumes and same_layout else None
        if streams is not None:
            plain["random_state"] = streams
        elif resumes and self.owner.trainer.ckpt_path:
            report_new_random_streams(path)
        return plain

    def _extras_in(self, plain: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Entries beside the optimizer's tensors in a checkpoint of any strategy.

        Raises:
            CheckpointError: only the original layout can read the checkpoint, or the user's own optimizer saved it.
        """
        if "optimizer_extras" in plain:
            return plain["optimizer_extras"]
        saved, why = plain.get("optimizer"), ""
        refuse_nemo(saved, path)
        metadata = load_content_metadata(preloaded_state_dict=dict(plain)) or {}
        if saved is None:
            why = "holds no optimizer state of Megatron-Core"
        elif metadata.get(SHARDING, RESHARDABLE) != RESHARDABLE:
            why = OWN_LAYOUT_ONLY
        if why:
            self.refuse_state(path, why)
        return {"step": step_of(saved), "loss_scaler": scaler_of(saved) or {}}
