# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model that is cut over ranks, in Megatron-Core's format, which any layout can read."""

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.dist_checkpointing.dict_utils import nested_values

from nemo2.checkpoint.directory import ckpt_to_dir, read_manifest
from nemo2.checkpoint.io import MegatronCheckpointIO, weights_dir
from nemo2.checkpoint.optimizer_forms import (
    completed,
    forget_updates,
    forms_of,
    from_pieces,
    torch_optimizers,
    under_saved_names,
    with_empty_states,
)
from nemo2.checkpoint.random_state import random_state, say_they_start_anew
from nemo2.checkpoint.untrusted import read_metadata
from nemo2.optim.megatron import MegatronOptimizer
from nemo2.parallel.sharded_state import added_keys
from nemo2.strategies.checkpoints import Checkpoints, paddings

_log = logging.getLogger(__name__)
_RECIPE_SETTINGS = {"betas", "eps", "weight_decay"}
"""Of an optimizer's groups: the recipe of the run that goes on decides them, and not the checkpoint."""
_FORM = "optimizer_of_another_form"
_MAY_BE_INCOMPLETE = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
"""Strictness under which what the checkpoint doesn't have, which Megatron-Core calls unexpected, stays as it was made."""


class CheckpointingStrategy(Checkpoints):
    """Save and load sharded state through `MegatronCheckpointIO`. Made to be subclassed."""

    async_save: bool
    _load_main_params: bool
    _strictness: Optional[str]
    _fully_reshardable: bool

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Publish a background save that has finished meanwhile."""
        if self.async_save and isinstance(self.checkpoint_io, MegatronCheckpointIO):
            self.checkpoint_io.maybe_finalize_save_checkpoint(blocking=False)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        assert self._checkpoint_io is not None
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Megatron-Core's optimizer is loaded with the model, in `load_model_state_dict`; a torch optimizer by Lightning."""
        return self._load_optimizer and any(not isinstance(opt, MegatronOptimizer) for opt in self.optimizers)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return (
            {} if isinstance(getattr(optimizer, "_optimizer", optimizer), MegatronOptimizer) else optimizer.state_dict()
        )

    @property
    def sharded_state_dict_metadata(self) -> dict[str, Any]:
        """How Megatron-Core cuts the optimizer's state: so that any layout can read it, or only the same one."""
        kind = "fully_reshardable" if self._fully_reshardable else "dp_reshardable"
        return {
            "distrib_optim_sharding_type": kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, Path], storage_options: Optional[dict[str, Any]] = None
    ) -> None:
        """Save Lightning's ``checkpoint`` with the model's and the optimizer's shards. Every rank calls it.

        ``storage_options``: ``published``, ``metrics`` and ``with_context``, see `ModelCheckpoint.save`.
        """
        assert self.megatron_parallel is not None
        self.megatron_parallel.force_param_sync()
        self._refuse_what_is_not_finite(self.megatron_parallel.parameters(), filepath)
        metadata = self.sharded_state_dict_metadata
        weights_only = "optimizer_states" not in checkpoint
        state: dict[str, Any] = {key: value for key, value in checkpoint.items() if key not in ("state_dict",)}
        model_state = self.megatron_parallel.sharded_state_dict(metadata=metadata)
        state["model"] = model_state
        if not weights_only:
            state.update(self._optimizer_shards(model_state, metadata, loading=False))
            state["random_state"] = random_state()
        state["nemo2"] = self._position()
        options = self._storage_options(storage_options, weights_only=weights_only or not self._save_optimizer)
        self.checkpoint_io.save_checkpoint(
            state, ckpt_to_dir(filepath), storage_options=options | {"content_metadata": metadata}
        )

    def _layout_record(self) -> dict[str, Any]:
        record = {field.name: getattr(self.layout, field.name) for field in fields(self.layout)}
        return record | {"world_size": self.num_nodes * self.num_processes}

    def _optimizer_shards(
        self, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
    ) -> dict[str, Any]:
        wanted = (self._load_optimizer or self._load_main_params) if loading else self._save_optimizer
        optimizers = [opt for opt in self.optimizers if isinstance(opt, MegatronOptimizer)]
        if not wanted or not optimizers:
            return {}
        return {"optimizer": optimizers[0].sharded_state_dict(model_state, is_loading=loading, metadata=dict(metadata))}

    def load_checkpoint(self, checkpoint_path: Union[str, Path], weights_only: Optional[bool] = None) -> dict[str, Any]:
        """Read a checkpoint into this rank's cut of the model and, when fitting, of the optimizer.

        A damaged one that `AutoResume` found, rather than was given, is passed over for the one before it.
        """
        path = Path(checkpoint_path)
        read = functools.partial(self._read, optimizer=self.trainer.state.fn == TrainerFn.FITTING)
        if isinstance(self.checkpoint_io, MegatronCheckpointIO):
            return self.checkpoint_io.read_whole(path, read)
        return read(path)

    def _added_keys(self) -> frozenset[str]:
        assert self.megatron_parallel is not None
        return frozenset(key for core in self.megatron_parallel.unwrapped for key in added_keys(core))

    def _read(self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False) -> dict[str, Any]:
        assert self.megatron_parallel is not None
        io: Any = self.checkpoint_io
        if not isinstance(io, MegatronCheckpointIO):
            return io.load_checkpoint(path)
        io.check(path)
        metadata = io.load_content_metadata(path) or self.sharded_state_dict_metadata
        manifest = read_manifest(path)
        wanted: dict[str, Any] = {}
        model_state = self.megatron_parallel.sharded_state_dict(metadata=metadata)
        if model:
            lacking = self._lacking(path, read_metadata(weights_dir(path)).state_dict_metadata) if base else frozenset()
            wanted["model"] = _without(model_state, lacking)
        copies = self._load_main_params and self.trainer.state.fn == TrainerFn.FITTING
        if (optimizer or copies) and not (manifest is not None and manifest.weights_only):
            wanted.update(self._optimizer_shards(model_state, metadata, loading=True))
            same_layout = manifest is not None and manifest.layout == self._layout_record()
            if same_layout:
                wanted["random_state"] = random_state()
            elif manifest is not None and self.trainer.ckpt_path:
                say_they_start_anew(path)
        reshaped = self._in_another_form(wanted, path)
        loaded = io.load_checkpoint(path, sharded_state_dict=wanted, strict=self._strictness)
        if model:
            self._say_if_another_vocabulary(model_state, path)
        if reshaped is not None:
            loaded["optimizer"] = wanted["optimizer"] = reshaped
        for part in ("model", "optimizer", "random_state"):
            if part not in wanted:
                loaded.pop(part, None)  # its plain data come unasked, without the tensors
        return loaded

    def _say_if_another_vocabulary(self, model_state: dict[str, Any], path: Path) -> None:
        """Megatron-Core reads the rows that there are, which is right for another padding of the same vocabulary."""
        padded = [value for value in nested_values(model_state) if getattr(value, "allow_shape_mismatch", False)]
        if not (self.is_global_zero and padded):
            return
        stored = read_metadata(weights_dir(path)).state_dict_metadata
        there = {stored[value.key].size[0] for value in padded if value.key in stored}
        here = {value.global_shape[0] for value in padded}
        if there - here - paddings(self.lightning_module, read_manifest(path)):
            _log.warning(
                "%s has %s rows of vocabulary, and this model %s, which isn't the same vocabulary padded for another "
                "tensor-parallel size: of the model's rows those that aren't there are zero, and those beyond its own are left "
                "out. Check the tokenizer and model.config.vocab_size.",
                path,
                max(there),
                max(here),
            )

    def _in_another_form(self, wanted: dict[str, Any], path: Path) -> Optional[dict[str, Any]]:
        """The optimizer's state, loaded, where it was saved by one of another form (distributed or not, fp32 or half
        precision, experts apart or not, cut by another strategy); its request is then taken out of ``wanted``. None where it
        is of this form."""
        io: Any = self.checkpoint_io
        if "optimizer" not in wanted:
            return None
        plain = io.load_checkpoint(path)
        saved = plain.get("optimizer")
        if "optimizer_extras" in plain:
            saved = from_pieces(wanted["optimizer"], plain["optimizer_extras"])
        elif saved is None or forms_of(saved) == forms_of(wanted["optimizer"]):
            return None
        own = wanted.pop("optimizer")
        request = under_saved_names(own, saved)
        # Asked for by itself: where fp32 parameters serve as their own copies, a name would be asked for twice.
        loaded = io.load_checkpoint(path, sharded_state_dict={_FORM: request}, strict=self._strictness)[_FORM]
        return completed(loaded, own, saved)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load chunks, optimizer, random streams and the position in the data from what `load_checkpoint` read."""
        assert self.megatron_parallel is not None
        if "model" in checkpoint:
            whole = self._strictness not in _MAY_BE_INCOMPLETE
            self.megatron_parallel.load_chunks_state_dict(checkpoint["model"], strict=strict and whole)
        optimizers = [opt for opt in self.optimizers if isinstance(opt, MegatronOptimizer)]
        if "optimizer" in checkpoint and optimizers:
            own = [dict(group) for group in optimizers[0].param_groups]
            optimizers[0].load_state_dict(with_empty_states(checkpoint["optimizer"]))
            if self._load_main_params:
                forget_updates(torch_optimizers(optimizers[0].mcore_optimizer))
            for group, before in zip(optimizers[0].param_groups, own, strict=True):
                kept = (
                    before.keys() - {"params", "step"} if self._load_main_params else before.keys() & _RECIPE_SETTINGS
                )
                group.update({name: before[name] for name in kept})
        elif optimizers:
            optimizers[0].reload_model_params()
        self._take_up_position(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Only called for torch optimizers, see `lightning_restore_optimizer`."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not isinstance(optimizer, MegatronOptimizer):
                optimizer.load_state_dict(state)

    def on_exception(self, exception: BaseException) -> None:
        """Give background saves up: finishing them takes all ranks, and this one may be the only one that failed. What they
        have written carries no checkpoint's name."""
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and self.world_size > 1:
            io.abandon()


def _without(state: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A sharded state without what is stored under these keys."""
    return {
        name: _without(value, keys) if isinstance(value, dict) else value
        for name, value in state.items()
        if getattr(value, "key", None) not in keys
    }
