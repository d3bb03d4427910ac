# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model that is cut over ranks, in Megatron-Core's format, which any layout can read."""

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.context import write_context
from nemo2.checkpoint.directory import Manifest, ckpt_to_dir
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.optimizer_forms import (
    completed,
    forget_updates,
    forms_of,
    from_pieces,
    torch_optimizers,
    under_saved_names,
)
from nemo2.checkpoint.random_state import load_random_state, random_state, say_they_start_anew
from nemo2.errors import CheckpointError, RuntimeFault
from nemo2.optim.megatron import MegatronOptimizer
from nemo2.strategies.stepping import SteppingStrategy

_log = logging.getLogger(__name__)
_FORM = "optimizer_of_another_form"
_MAY_BE_INCOMPLETE = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")
"""Strictness under which what the checkpoint doesn't have, which Megatron-Core calls unexpected, stays as it was made."""


class CheckpointingStrategy(SteppingStrategy):
    """Save and load sharded state through `MegatronCheckpointIO`. Made to be subclassed."""

    restore_config: Optional[RestoreConfig]
    async_save: bool
    _load_optimizer: bool
    _save_optimizer: bool
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
    def restore_checkpoint_after_setup(self) -> bool:
        """State is loaded into chunks that are built, wrapped and cut."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Megatron-Core's optimizer is loaded with the model, in `load_model_state_dict`; a torch optimizer by Lightning."""
        return self._load_optimizer and any(not isinstance(opt, MegatronOptimizer) for opt in self.optimizers)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's own dump stays free of tensors; `save_checkpoint` adds the sharded ones."""
        return {}

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
        options = storage_options or {}
        self.megatron_parallel.force_param_sync()
        self._refuse_what_is_not_finite(filepath)
        metadata = self.sharded_state_dict_metadata
        weights_only = "optimizer_states" not in checkpoint
        state: dict[str, Any] = {key: value for key, value in checkpoint.items() if key not in ("state_dict",)}
        model_state = self.megatron_parallel.sharded_state_dict(metadata=metadata)
        state["model"] = model_state
        if not weights_only:
            state.update(self._optimizer_shards(model_state, metadata, loading=False))
            state["random_state"] = random_state()
        state["nemo2"] = {"consumed_samples": self.consumed_samples, "global_step": self.trainer.global_step}
        manifest = Manifest(
            step=self.trainer.global_step,
            consumed_samples=self.consumed_samples,
            layout=self._layout_record(),
            metrics=options.get("metrics") or {},
            weights_only=weights_only or not self._save_optimizer,
            versions=versions(),
        )
        with_context = options.get("with_context", True)
        self.checkpoint_io.save_checkpoint(
            state,
            ckpt_to_dir(filepath),
            storage_options={
                "manifest": manifest,
                "content_metadata": metadata,
                "write_context": (lambda path: write_context(path, self.trainer)) if with_context else None,
                "published": options.get("published"),
            },
        )

    def _refuse_what_is_not_finite(self, filepath: Union[str, Path]) -> None:
        """Parameters that aren't numbers make no checkpoint: retention would drop good ones for them.

        Raises:
            RuntimeFault: on every rank, if some parameter of some rank isn't finite.
        """
        # By their least and greatest value, which NaN becomes: no memory is needed, and they are read once.
        extremes = [
            torch.aminmax(parameter.detach()) for parameter in self.megatron_parallel.parameters() if parameter.numel()
        ]  # pyright: ignore[reportOptionalMemberAccess]
        flags = [value.isfinite() for pair in extremes for value in pair]
        finite = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
        worst = finite.to(dtype=torch.int32, device=self.root_device).reshape(1)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MIN)
        if not worst:
            raise RuntimeFault(
                f"After step {self.trainer.global_step} some parameters aren't finite numbers: {ckpt_to_dir(filepath).name} is "
                "not saved, and the checkpoints before it stay. Start again from the last one with a lower learning rate, or "
                "with the callback LossGuard(on_nonfinite='skip')."
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
        if isinstance(self.checkpoint_io, MegatronCheckpointIO):
            path = self.checkpoint_io.choose(path)
        return self._read(path, optimizer=self.trainer.state.fn == TrainerFn.FITTING)

    def _read(self, path: Path, *, optimizer: bool, model: bool = True) -> dict[str, Any]:
        from nemo2.checkpoint.directory import read_manifest

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
            wanted["model"] = model_state
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
        if reshaped is not None:
            loaded["optimizer"] = wanted["optimizer"] = reshaped
        for part in ("model", "optimizer", "random_state"):
            if part not in wanted:
                loaded.pop(part, None)  # its plain data come unasked, without the tensors
        return loaded

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
            optimizers[0].load_state_dict(checkpoint["optimizer"])
            if self._load_main_params:
                forget_updates(torch_optimizers(optimizers[0].mcore_optimizer))
                for group, before in zip(optimizers[0].param_groups, own, strict=True):
                    group.update({name: value for name, value in before.items() if name not in ("params", "step")})
        elif optimizers:
            optimizers[0].reload_model_params()
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if "random_state" in checkpoint:
            load_random_state(checkpoint["random_state"])
        position = checkpoint.get("nemo2")
        if position is not None and self.data_sampler is not None and self.trainer.ckpt_path:
            self.data_sampler.load_state_dict(position)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Only called for torch optimizers, see `lightning_restore_optimizer`."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not isinstance(optimizer, MegatronOptimizer):
                optimizer.load_state_dict(state)

    def selective_restore(self) -> None:
        """Start from the weights (and, if asked, the optimizer state) of ``restore_config``.

        Raises:
            CheckpointError: that checkpoint can't be read.
        """
        assert self.restore_config is not None
        path = Path(self.restore_config.path)
        if not path.exists():
            raise CheckpointError(
                f"resume.restore_config.path={self.restore_config.path}: no such checkpoint directory."
            )
        loaded = self._read(
            path, optimizer=self.restore_config.load_optim_state, model=self.restore_config.load_model_state
        )
        kept = {key: value for key, value in loaded.items() if key in ("model", "optimizer")}
        self.load_model_state_dict(kept, strict=True)
        _log.info("Started from the weights of %s.", path)

    def remove_checkpoint(self, filepath: Union[str, Path]) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(ckpt_to_dir(filepath))

    def on_exception(self, exception: BaseException) -> None:
        """Give background saves up: finishing them takes all ranks, and this one may be the only one that failed. What they
        have written carries no checkpoint's name."""
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and self.world_size > 1:
            io.abandon()

    def teardown(self) -> None:
        """Finish background saves. The groups stay, so that the model can be used; another layout replaces them."""
        self.checkpoint_io.teardown()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("nemo2", "megatron-core", "torch", "lightning")}
