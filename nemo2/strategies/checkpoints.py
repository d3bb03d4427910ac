# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoint hooks for all strategies. The strategy's `form` decides the format."""

import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from nemo2 import ranks
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.changes import inputs_of, settings_of
from nemo2.checkpoint.context import write_context
from nemo2.checkpoint.directory import Manifest, ckpt_to_dir, versions
from nemo2.checkpoint.forms.form import Form
from nemo2.checkpoint.io import MegatronCheckpointIO
from nemo2.checkpoint.paths import digest_of, missing
from nemo2.checkpoint.random_state import load_random_state
from nemo2.errors import CheckpointError, ConfigError, RuntimeFault
from nemo2.optim.lr_scheduler import set_last_rates
from nemo2.strategies.stepping import SteppingStrategy

_log = logging.getLogger(__name__)
_digest_of_base = functools.cache(digest_of)
"""Computed once, because the base of a run doesn't change."""


class Checkpoints(SteppingStrategy):
    """Save and load through ``form`` and the checkpoint IO, to be subclassed. Sharded state is read after the model
    has been sharded."""

    restore_config: Optional[RestoreConfig]
    _loaded: Optional[Path] = None
    """The checkpoint that was read last. None: none was."""
    form: Form
    _whole_without_base: bool = False
    """Whether checkpoints hold the whole model where no other checkpoint holds the rest of it."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        assert self._checkpoint_io is not None
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: state is loaded into chunks that are built, wrapped and sharded."""
        return True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Publish a background save that has finished."""
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and io.async_save:
            io.maybe_finalize_save_checkpoint(blocking=False)

    def save_only_what_is_trained(self) -> None:
        """Save the trainable parameters only, unless the user has set what checkpoints hold, or no checkpoint holds the
        other parameters: `on_train_start` knows that."""
        if self.form.part is None:
            self.form.part = "trained"
            self._whole_without_base = True

    def on_train_start(self) -> None:
        """Set the rates of the restored schedules, which schedules of torch's multiply, and check that saved parts can be
        completed. Weights are already loaded.

        Raises:
            ConfigError: only a part of the model is to be saved, and the source of the other parameters is unknown.
        """
        super().on_train_start()
        for config in self.lr_scheduler_configs:
            set_last_rates(config.scheduler)
        part = self.form.part
        if part is not None and not self.form.base and self._whole_without_base:
            self.form.part = None
        elif part is not None and not self.form.base:
            raise ConfigError(
                f"strategy.ckpt_save_part={part!r}: this run knows no checkpoint with the rest of the model. Set "
                "resume.restore_config.path to the base checkpoint, or leave ckpt_save_part unset."
            )

    # ------------------------------------------------------------------------------------------------------ saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """An empty state, so that Lightning's own dump has no tensors. `save_checkpoint` adds the sharded tensors."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self.form.optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, Path], storage_options: Optional[dict[str, Any]] = None
    ) -> None:
        """Save Lightning's ``checkpoint`` with this rank's part of the model and the optimizer. Every rank must call
        it.

        ``storage_options``: ``published``, ``metrics`` and ``with_context``, see `ModelCheckpoint.save`.
        """
        self._refuse_what_is_not_finite(self.form.parameters(), filepath)
        with_optimizer = "optimizer_states" in checkpoint
        state: dict[str, Any] = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        state |= self.form.state(optimizer=with_optimizer)
        state["nemo2"] = {"consumed_samples": self.consumed_samples, "global_step": self.trainer.global_step}
        options = self._storage_options(storage_options, weights_only=not (with_optimizer and self.form.save_optimizer))
        self.checkpoint_io.save_checkpoint(state, ckpt_to_dir(filepath), storage_options=options)

    def _refuse_what_is_not_finite(self, tensors: Iterable[Tensor], filepath: Union[str, Path]) -> None:
        """Reject a save of parameters that aren't finite, because retention would delete good checkpoints for it.

        Args:
            tensors: This rank's part of the parameters.

        Raises:
            RuntimeFault: on every rank, if some parameter of some rank isn't finite.
        """
        # Checked by the smallest and largest value, which NaN propagates to. This needs no memory and one read.
        extremes = [
            torch.aminmax(tensor.detach()) for tensor in tensors if tensor.numel() and tensor.is_floating_point()
        ]
        flags = [value.isfinite() for pair in extremes for value in pair]
        finite = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
        if ranks.largest((~finite).to(dtype=torch.int32, device=self.root_device).reshape(1)):
            raise RuntimeFault(
                f"After step {self.trainer.global_step} some parameters aren't finite, so {ckpt_to_dir(filepath).name} "
                "is not saved. Earlier checkpoints are kept. Resume from the last checkpoint with a lower learning "
                "rate, or with the callback LossGuard(on_nonfinite='skip')."
            )

    def _storage_options(self, options: Optional[dict[str, Any]], *, weights_only: bool) -> dict[str, Any]:
        """The options for the checkpoint IO, from those that `ModelCheckpoint.save` passed to the strategy."""
        options = options or {}
        manifest = Manifest(
            step=self.trainer.global_step,
            consumed_samples=self.consumed_samples,
            layout=self.form.layout_record(),
            metrics=options.get("metrics") or {},
            weights_only=weights_only,
            settings=settings_of(self.trainer) | inputs_of(self.trainer),
            part_of=None if self.form.part is None else str(self.form.base),
            part_of_digest="" if self.form.part is None else self.digest_of(self.form.base),
            versions=versions(),
            **(options.get("run") or {}),
        )
        with_context = options.get("with_context", True)
        return {
            "manifest": manifest,
            "write_context": (
                (lambda path: write_context(path, self.trainer, release=self._release())) if with_context else None
            ),
            "published": options.get("published"),
            **self.form.storage_options(),
        }

    def _release(self) -> Optional[dict[str, Any]]:
        """The config.json of the release that this run's weights come from. None: there is none."""
        from nemo2.hugging_face.restore import release_of

        restore = self.restore_config
        begun = restore.path if restore is not None and restore.load_model_state else None
        paths = [str(path) for path in (self._loaded, begun) if path]
        return next((release for path in paths if (release := release_of(path)) is not None), None)

    # ------------------------------------------------------------------------------------------------------ loading

    def load_checkpoint(self, checkpoint_path: Union[str, Path], weights_only: Optional[bool] = None) -> dict[str, Any]:
        """Read a checkpoint into this rank's shard of the model and, when fitting, of the optimizer.

        If `AutoResume` chose the checkpoint itself and it is damaged, the previous checkpoint is read instead.

        Raises:
            CheckpointError: the checkpoint is unreadable, or has no optimizer state that this strategy can load.
        """
        self._loaded = path = Path(checkpoint_path)
        io = self.checkpoint_io
        if not isinstance(io, MegatronCheckpointIO):
            return io.load_checkpoint(path)
        read_from, loaded = io.read_whole(path, functools.partial(self.form.read, optimizer=self._fits))
        if read_from != path and self.trainer.ckpt_path:
            # Lightning reports this path, and callbacks read it to learn what the run resumed from.
            self.trainer._checkpoint_connector._ckpt_path = read_from
        return loaded

    @property
    def _fits(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load chunks, optimizer, random streams and the position in the data from the result of `load_checkpoint`."""
        self.form.take(checkpoint, strict=strict)
        self._take_up_position(checkpoint)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self.form.lightning_loads_optimizer

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.form.load_optimizer_states(checkpoint["optimizer_states"])

    def _take_up_position(self, checkpoint: Mapping[str, Any]) -> None:
        """When fitting: restore the random streams and the position in the data, if ``checkpoint`` has them."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if "random_state" in checkpoint:
            load_random_state(checkpoint["random_state"])
        position = checkpoint.get("nemo2")
        if position is not None and self.data_sampler is not None and self.trainer.ckpt_path:
            self.data_sampler.load_state_dict(position)

    def selective_restore(self) -> None:
        """Start from the weights, and if requested the optimizer state, of ``restore_config``.

        Raises:
            CheckpointError: the checkpoint is unreadable or doesn't fit the model.
        """
        assert self.restore_config is not None
        path = self.restore_config.checkpoint
        if path is None:
            if self.restore_config.load_model_state:
                self.start_from_released(self.restore_config.path)
            return
        if (why := missing(self.restore_config.path)) is not None:
            raise CheckpointError(f"resume.restore_config.path={self.restore_config.path}: {why}")
        loaded = self.form.read(
            path,
            optimizer=self.restore_config.load_optim_state,
            model=self.restore_config.load_model_state,
            base=True,
        )
        # Neither the position in the data nor the random streams are restored, because this is another run.
        kept = {key: value for key, value in loaded.items() if key in ("model", "optimizer")}
        self.load_model_state_dict(kept, strict=True)
        _log.info("Started from the weights of %s.", path)

    def start_from_released(self, path: str) -> None:
        """Fill the model with released weights. Each rank reads its part, and every rank must call it.

        Args:
            path: ``hf:///folder`` or ``hf://organisation/name``.

        Raises:
            CheckpointError: on every rank, if a rank can't read its part or the weights don't fit the model.
            ConfigError: an optimizer state is to be loaded, which no release has.
        """
        from nemo2.hugging_face.restore import start_from

        if self.restore_config is not None and self.restore_config.load_optim_state:
            raise ConfigError(
                f"resume.restore_config.load_optim_state=True: {path} contains weights only, like all released models. "
                "Set load_optim_state=False."
            )
        start_from(
            path,
            config=getattr(self.lightning_module, "config", None),
            pieces=self.form.model_pieces(),
            also=self.form.added_keys(),
            downloads=self.local_rank == 0,
        )
        self.form.finish_reading(model=True, optimizer=False)
        _log.info("Started from the weights of %s.", path)

    def digest_of(self, base: Optional[Union[str, Path]]) -> str:
        """The digest of the weights at ``base``, a checkpoint or released weights. "": there are none, or they
        aren't on this machine."""
        return "" if base is None else _digest_of_base(str(base))

    def remove_checkpoint(self, filepath: Union[str, Path]) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(ckpt_to_dir(filepath))

    def teardown(self) -> None:
        """Finish the work of the checkpoint IO. The groups stay, so that the model remains usable. Another layout
        replaces them."""
        self.checkpoint_io.teardown()
        graphs = getattr(getattr(self, "megatron_parallel", None), "graphs", None)
        if graphs is not None:
            graphs.close()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Publish the background saves that all ranks have written, and discard the others: finishing them needs all
        ranks, and this may be the only rank that failed."""
        io = self.checkpoint_io
        if isinstance(io, MegatronCheckpointIO) and self.world_size > 1:
            io.abandon()
