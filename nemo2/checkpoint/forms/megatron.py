# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's sharded state, which any layout can read."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, cast

from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError
from nemo2.base.names import listed
from nemo2.checkpoint.directory import Manifest, read_manifest, weights_dir
from nemo2.checkpoint.forms.form import OWN_LAYOUT_ONLY, RESHARDABLE, SHARDING, Form, paddings
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.metadata import read_metadata
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.optim.megatron import MegatronOptimizer
from nemo2.mcore.parallel.layout import LAYOUT_FIELDS, Layout
from nemo2.mcore.parallel.sharded_state import added_keys, frozen_keys, keys_of, part_of, unstacked
from nemo2.mcore.parallel.transform import record_of, tell_of_loaded_weights

if TYPE_CHECKING:
    from nemo2.checkpoint.shards import Shard

_STATE = "optimizer."
_AVOID_PREFIX = "chained_optim_avoid_prefix"
_log = logging.getLogger(__name__)
_DEFAULTS_OF_TORCH = {"foreach", "fused", "capturable", "maximize", "differentiable", "decoupled_weight_decay"}
"""Settings that torch's optimizers complete in the state of an older torch."""
_FORM = "optimizer_of_another_form"
_MAY_BE_INCOMPLETE = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
"""Strictness values under which tensors that the checkpoint lacks, which Megatron-Core calls unexpected, keep their
initial values."""


@dataclass(eq=False, kw_only=True)
class MegatronForm(Form):
    """Megatron-Core's sharded state, written by `MegatronCheckpointIO` or the user's own checkpoint IO."""

    strictness: Optional[str] = None
    """The name of one of Megatron-Core's ``StrictHandling`` values. None: a tensor that the model has and the checkpoint
    lacks is an error."""
    fully_reshardable: bool = True
    """Shard the optimizer's state so that any layout can read it. False: only the same layout can."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Megatron-Core's settings for sharding the optimizer's state. Any layout reads that of optimizers that aren't
        distributed; under the other setting Megatron-Core would store several of them under other keys than it reads."""
        distributed = getattr(self.parallel.ddp_config, "use_distributed_optimizer", False)
        kind = "dp_reshardable" if distributed and not self.fully_reshardable else RESHARDABLE
        return {
            SHARDING: kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            _AVOID_PREFIX: True,
            "singleton_local_shards": False,
        }

    def parameters(self) -> Iterable[Tensor]:
        self.parallel.force_param_sync()
        return self.parallel.parameters()

    def state(self, *, optimizer: bool) -> dict[str, Any]:
        model_state = self.parallel.sharded_state_dict(metadata=self.metadata)
        state: dict[str, Any] = {"model": model_state if self.part is None else self._part(model_state, self.keeps)}
        if optimizer:
            from nemo2.checkpoint.random_state import random_state

            state |= self._optimizer_shards(self._by_layer(model_state), self.metadata, loading=False)
            state["random_state"] = random_state()
        return state

    def storage_options(self) -> dict[str, Any]:
        return {"content_metadata": self.metadata}

    @property
    def _optimizers(self) -> list[MegatronOptimizer]:
        return [optimizer for optimizer in self.owner.optimizers if isinstance(optimizer, MegatronOptimizer)]

    def _optimizer_shards(
        self, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
    ) -> dict[str, Any]:
        wanted = (self.load_optimizer or self.load_main_params) if loading else self.save_optimizer
        if not wanted or not self._optimizers:
            return {}
        from nemo2.checkpoint.optimizer_forms import prepare_save, with_step_of_all

        whole = self._optimizers[0]
        shards = whole.sharded_state_dict(model_state, is_loading=loading, metadata=dict(metadata))
        return {"optimizer": shards if loading else with_step_of_all(prepare_save(shards))}

    # ------------------------------------------------------------------------------------------------------ a part

    def _part(self, model_state: dict[str, Any], keep: Any) -> dict[str, Any]:
        """The part of the chunks' state that ``keep(name, trained)`` selects, with separate layers."""
        return self._of_chunks(model_state, lambda core, state: part_of(core, state, keep))

    def _by_layer(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """The model state that describes the optimizer's state in a save."""
        return self._frozen_apart(model_state) if self.part is None else self._part(model_state, lambda *_: True)

    def _frozen_apart(self, model_state: dict[str, Any], stored: Collection[str] = ()) -> dict[str, Any]:
        """The chunks' state with separate layers if some aren't trained.

        Megatron-Core would stack the optimizer's tensors of these layers, and a stack must be complete. ``stored`` are
        the keys of a checkpoint, whose stacks stay stacks.
        """
        here: set[str] = set()
        self._of_chunks(model_state, lambda core, state: here.update(frozen_keys(state)))
        everywhere = set().union(*ranks.gather(here))  # other stages hold layers of the same stack
        keys = {
            key for key in everywhere if not any(one.startswith(_STATE) and one.endswith(f".{key}") for one in stored)
        }
        return self._of_chunks(model_state, lambda core, state: unstacked(state, keys)) if keys else model_state

    def _of_chunks(self, model_state: dict[str, Any], change: Callable[[Any, dict[str, Any]], Any]) -> dict[str, Any]:
        """``change(chunk, its part of the state)`` for each chunk of the pipeline stage."""
        cores = self.parallel.unwrapped
        if len(cores) == 1:
            return change(cores[0], model_state)
        return {name: change(core, model_state[name]) for name, core in zip(model_state, cores, strict=True)}

    # ------------------------------------------------------------------------------------------------------ loading

    def added_keys(self) -> frozenset[str]:
        return frozenset(key for core in self.parallel.unwrapped for key in added_keys(core))

    def read_whole(
        self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False, part: bool = False
    ) -> dict[str, Any]:
        from nemo2.checkpoint.random_state import report_new_random_streams, stored_random_state

        io: Any = self.io
        if not isinstance(io, MegatronCheckpointIO):
            return io.load_checkpoint(path)
        plain = io.load_checkpoint(path)
        self._refuse_optimizers_of_others(path, optimizer=optimizer)
        manifest = read_manifest(path)
        stored = read_metadata(weights_dir(path)).state_dict_metadata
        metadata = self._saved_metadata(plain, stored)
        wanted: dict[str, Any] = {}
        model_state = self.parallel.sharded_state_dict(metadata=metadata)
        if part:
            model_state = self._part(model_state, lambda name, trained: True)
            here = set().union(*map(keys_of, nested_values(model_state)))
            wanted["model"] = _without(model_state, here - self.part_in(path, stored, here))
        elif model:
            wanted["model"] = _without(model_state, self.lacking(path, stored) if base else frozenset())
        copies = self.load_main_params and self.owner.trainer.state.fn == TrainerFn.FITTING
        if (optimizer or copies) and not (manifest is not None and manifest.weights_only):
            described = model_state if part else self._frozen_apart(model_state, stored)
            wanted.update(self._optimizer_shards(described, metadata, loading=True))
            if "optimizer" in wanted:
                if metadata.get(SHARDING, RESHARDABLE) != RESHARDABLE:
                    self._refuse_buffers_of_others(path, manifest, wanted["optimizer"])
                requested = (value.key for value in nested_values(wanted["optimizer"]) if hasattr(value, "key"))
                self.warn_of_unused_state(path, stored, requested)
            same_layout = manifest is not None and manifest.layout == self.layout_record()
            streams = stored_random_state(stored) if same_layout else None
            if streams is not None:
                wanted["random_state"] = streams
            elif manifest is not None and self.owner.trainer.ckpt_path:
                report_new_random_streams(path)
        reshaped = self._in_another_form(wanted, plain, path)
        requested, apart = dict(wanted), {}
        if "model" in wanted and ("optimizer" in wanted or reshaped is not None):
            from nemo2.checkpoint.optimizer_forms import read_main_parameters

            if read_main_parameters(wanted["model"], stored):  # the optimizer requests them too
                apart = {"model": requested.pop("model")}
        loaded = io.load_checkpoint(path, sharded_state_dict=requested, strict=self.strictness)
        if apart:
            loaded["model"] = io.load_checkpoint(path, sharded_state_dict=apart, strict=self.strictness)["model"]
        if "model" in wanted:
            loaded["model"] = self._chunks_in(loaded.get("model", {}), model_state)
        if model:
            self._warn_of_another_vocabulary(model_state, path)
        if reshaped is not None:
            loaded["optimizer"] = wanted["optimizer"] = reshaped
        for kind in ("model", "optimizer", "random_state"):
            if kind not in wanted:
                loaded.pop(kind, None)  # its plain data are loaded without being requested
        return loaded

    def _saved_metadata(self, plain: dict[str, Any], stored: Iterable[str]) -> dict[str, Any]:
        """`metadata` of a checkpoint. Any layout reads a state that no distributed optimizer has saved."""
        from nemo2.checkpoint.optimizer_forms import forms_of

        metadata = load_content_metadata(preloaded_state_dict=plain) or self.metadata
        distributed = "distributed" in forms_of(plain.get("optimizer") or {})
        prefixed = any(
            key.startswith("chained_") for key in stored
        )  # as such optimizers were stored before, see `metadata`
        return metadata if distributed else metadata | {SHARDING: RESHARDABLE, _AVOID_PREFIX: not prefixed}

    def _refuse_buffers_of_others(self, path: Path, manifest: Optional[Manifest], wanted: dict[str, Any]) -> None:
        """Refuse a distributed optimizer's buffers as they are, where this run's parameters aren't in the same buffers.

        Raises:
            CheckpointError: the layout or the optimizer is another one.
        """
        from nemo2.checkpoint.optimizer_forms import forms_of

        record = manifest.layout if manifest is not None and manifest.layout else self.layout_record()
        before = Layout(**{name: record[name] for name in LAYOUT_FIELDS if name in record})
        if "distributed" not in forms_of(wanted) or _model_parallel(before) != _model_parallel(self.owner.layout):
            self.refuse_state(path, OWN_LAYOUT_ONLY)

    def _chunks_in(self, loaded: dict[str, Any], requested: dict[str, Any]) -> dict[str, Any]:
        """``loaded`` in the form of this rank's chunks.

        For a writing chunk without a saved part, the checkpoint has an empty entry, which is loaded without being
        requested. For a chunk of this rank without a saved part, no entry is loaded.
        """
        if len(self.parallel.unwrapped) == 1:
            return {name: value for name, value in loaded.items() if name in requested}
        return {name: loaded.get(name, {}) for name in requested}

    def _warn_of_another_vocabulary(self, model_state: dict[str, Any], path: Path) -> None:
        """Report a difference in vocabulary size. Megatron-Core reads the existing rows, which is right for another
        padding of the same vocabulary."""
        padded = [value for value in nested_values(model_state) if getattr(value, "allow_shape_mismatch", False)]
        if not (self.owner.is_global_zero and padded):
            return
        stored = read_metadata(weights_dir(path)).state_dict_metadata
        there = {stored[value.key].size[0] for value in padded if value.key in stored}
        here = {value.global_shape[0] for value in padded}
        if there - here - paddings(self.owner.lightning_module, read_manifest(path)):
            _log.warning(
                "%s has a vocabulary of %s rows, but this model has %s, and the difference is not the padding for "
                "another tensor-parallel size. Rows that the checkpoint lacks are zero, and rows beyond the model's "
                "are dropped. Check the tokenizer and model.config.vocab_size.",
                path,
                max(there),
                max(here),
            )

    def _in_another_form(self, wanted: dict[str, Any], plain: dict[str, Any], path: Path) -> Optional[dict[str, Any]]:
        """The loaded optimizer state, if an optimizer of another form saved it: distributed or not, fp32 or half
        precision, experts separate or not, sharded by another strategy.

        Its request is then removed from ``wanted``. None: the state has this form.
        """
        if "optimizer" not in wanted:
            return None
        from nemo2.checkpoint import optimizer_forms

        saved = plain.get("optimizer")
        optimizer_forms.refuse_nemo(saved, path)
        if "optimizer_extras" in plain:
            saved = optimizer_forms.from_shards(wanted["optimizer"], plain["optimizer_extras"])
        elif saved is None or optimizer_forms.forms_of(saved) == optimizer_forms.forms_of(wanted["optimizer"]):
            return None
        own = wanted.pop("optimizer")
        request = optimizer_forms.under_saved_names(own, saved)
        # Requested separately: if fp32 parameters are their own copies, a name would otherwise be requested twice.
        loaded = self.io.load_checkpoint(path, sharded_state_dict={_FORM: request}, strict=self.strictness)[_FORM]
        return optimizer_forms.completed(loaded, own, saved)

    def _refuse_optimizers_of_others(self, path: Path, *, optimizer: bool) -> None:
        manifest: Optional[Manifest] = read_manifest(path)
        written_by = manifest.layout.get("strategy") if manifest is not None and not manifest.weights_only else None
        own = [item for item in self.owner.optimizers if not isinstance(item, MegatronOptimizer)]
        if written_by and optimizer and self.load_optimizer and own:
            raise CheckpointError(
                f"{path} was saved under {written_by}. MegatronStrategy with the optimizer {type(own[0]).__name__} of "
                "this module can load its weights, but not its optimizer state. Set "
                "strategy.ckpt_load_optimizer=False, or start a new run from its weights with resume.restore_config."
            )

    def take(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        if "model" in checkpoint:
            complete = self.strictness not in _MAY_BE_INCOMPLETE
            self.parallel.load_chunks_state_dict(checkpoint["model"], strict=strict and complete)
        optimizers = self._optimizers
        if "optimizer" in checkpoint and optimizers:
            from nemo2.checkpoint.optimizer_forms import forget_updates, keep_settings, prepare_load, torch_optimizers

            own = [dict(group) for group in optimizers[0].param_groups]
            whole = optimizers[0].mcore_optimizer
            optimizers[0].load_state_dict(prepare_load(checkpoint["optimizer"], whole))
            if self.load_main_params:
                forget_updates(torch_optimizers(whole))
            keep_settings(optimizers[0].param_groups, own)
        if optimizers and not {"model", "optimizer"} <= checkpoint.keys():
            # The main parameters follow the model's: either weren't loaded, or only they were.
            optimizers[0].reload_model_params()

    def model_shards(self) -> "list[Shard]":
        from nemo2.checkpoint.shards import Shard

        state = self.parallel.sharded_state_dict(metadata=self.metadata)
        apply_factories(state)
        tensors = [leaf for leaf in nested_values(state) if isinstance(leaf, ShardedTensor) and leaf.data is not None]
        return [
            Shard(
                key=leaf.key,
                tensor=cast(Tensor, leaf.data).detach()[(None,) * leaf.prepend_axis_num],
                offset=tuple(leaf.global_offset),
                global_shape=tuple(leaf.global_shape),
                padded=leaf.allow_shape_mismatch,
            )
            for leaf in tensors
        ]

    def report_loaded_keys(self, keys: set[str]) -> None:
        from nemo2.mcore.parallel.stored_names import names_of, stored_names

        for core in self.parallel.unwrapped:
            tell_of_loaded_weights(core, names_of(stored_names(core), keys) if record_of(core) is not None else ())

    def finish_reading(self, *, model: bool, optimizer: bool) -> None:
        for whole in self._optimizers[:1]:
            whole.reload_model_params()

    # ------------------------------------------------------------------------------------------------------ torch optimizers

    @property
    def lightning_loads_optimizer(self) -> bool:
        """False for Megatron-Core's optimizer, which is loaded with the model. Lightning loads a torch optimizer."""
        return self.load_optimizer and len(self._optimizers) < len(self.owner.optimizers)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        megatron = isinstance(getattr(optimizer, "_optimizer", optimizer), MegatronOptimizer)
        return {} if megatron else optimizer.state_dict()

    def load_optimizer_states(self, states: Iterable[dict[str, Any]]) -> None:
        """Load torch's optimizers. What a recipe sets is the recipe's; what a module's own ``configure_optimizers`` sets is
        the checkpoint's, as under Lightning.

        Raises:
            CheckpointError: an optimizer of another kind saved the state.
        """
        by_recipe = isinstance(getattr(self.owner.lightning_module, "optim", None), OptimizerModule)
        for optimizer, state in zip(self.owner.optimizers, states, strict=True):
            if isinstance(optimizer, MegatronOptimizer):
                continue
            own = [dict(group) for group in optimizer.param_groups]
            lacking = optimizer.defaults.keys() - set().union(*state["param_groups"]) - _DEFAULTS_OF_TORCH
            if lacking:
                raise CheckpointError(
                    f"{self.owner.trainer.ckpt_path} holds the state of another optimizer than {type(optimizer).__name__}: its "
                    f"groups have no {listed(sorted(lacking))}. Train with the optimizer of the checkpoint, or set "
                    "strategy.ckpt_load_optimizer=False."
                )
            optimizer.load_state_dict(state)
            if by_recipe:
                from nemo2.checkpoint.optimizer_forms import keep_settings

                keep_settings(optimizer.param_groups, own)


def _without(state: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A sharded state without the entries that are stored under these keys."""
    return {
        name: _without(value, keys) if isinstance(value, dict) else value
        for name, value in state.items()
        if isinstance(value, dict) or not (own := keys_of(value)) or own.difference(keys)
    }


def _model_parallel(layout: Layout) -> tuple[int, ...]:
    """The sizes that decide which parameters a rank holds."""
    return layout.tp, layout.pp, layout.vp or 1, layout.ep, layout.expert_tensor_size
