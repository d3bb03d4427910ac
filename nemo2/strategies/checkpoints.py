# SPDX-License-Identifier: Apache-2.0
"""What saving and loading has in common under all strategies, whatever the files look like."""

import importlib.metadata
import logging
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.changes import settings_of
from nemo2.checkpoint.context import write_context
from nemo2.checkpoint.directory import Manifest, ckpt_to_dir
from nemo2.checkpoint.random_state import load_random_state
from nemo2.data.tokenizer import get_vocab_size
from nemo2.errors import CheckpointError, RuntimeFault
from nemo2.strategies.stepping import SteppingStrategy

_log = logging.getLogger(__name__)
_USUAL_SIZES = [2**power for power in range(7)]


class Checkpoints(SteppingStrategy):
    """Sharded state is read after the model has been cut. Made to be subclassed, by what knows a format."""

    restore_config: Optional[RestoreConfig]
    _load_optimizer: bool
    _save_optimizer: bool

    @abstractmethod
    def _read(self, path: Path, *, optimizer: bool, model: bool = True, base: bool = False) -> dict[str, Any]:
        """What `load_model_state_dict` takes: of a checkpoint, the model and the optimizer as asked for, and plain data.
        ``base``: it may be of the model before its transform.

        Raises:
            CheckpointError: it can't be read into this model.
        """

    @abstractmethod
    def _added_keys(self) -> frozenset[str]:
        """Under which keys is stored what ``model_transform`` has added to this rank's part of the model."""

    def _lacking(self, path: Path, stored: Collection[str]) -> frozenset[str]:
        """Of `_added_keys`, those that a checkpoint of the model before its transform doesn't have: all of them.

        Raises:
            CheckpointError: it has some of them.
        """
        parts: list[frozenset[str]] = [self._added_keys()] * self.world_size
        torch.distributed.all_gather_object(parts, parts[0])
        added = frozenset().union(*parts)
        lacking = frozenset(key for key in added if not any(name.partition("/shard_")[0] == key for name in stored))
        if lacking and lacking != added:
            raise CheckpointError(
                f"{path} has some of what model_transform adds to the model, and lacks {', '.join(sorted(lacking)[:3])}"
                f"{' ...' if len(lacking) > 3 else ''}: it was saved with another transform. Give the transform it was saved "
                "with, or a checkpoint of the model without any."
            )
        if lacking and self.is_global_zero:
            _log.info(
                "%s has none of what model_transform adds to the model, which starts as the transform made it.", path
            )
        return lacking

    @abstractmethod
    def _layout_record(self) -> dict[str, Any]:
        """What the manifest says of the ranks."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """State is loaded into chunks that are built, wrapped and cut."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's own dump stays free of tensors; `save_checkpoint` adds the sharded ones."""
        return {}

    def _position(self) -> dict[str, int]:
        """Where training stands in its data."""
        return {"consumed_samples": self.consumed_samples, "global_step": self.trainer.global_step}

    def _refuse_what_is_not_finite(self, tensors: Iterable[Tensor], filepath: Union[str, Path]) -> None:
        """Parameters that aren't numbers make no checkpoint: retention would drop good ones for them.

        Args:
            tensors: What this rank has of them.

        Raises:
            RuntimeFault: on every rank, if some parameter of some rank isn't finite.
        """
        # By their least and greatest value, which NaN becomes: no memory is needed, and they are read once.
        extremes = [
            torch.aminmax(tensor.detach()) for tensor in tensors if tensor.numel() and tensor.is_floating_point()
        ]
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

    def _storage_options(self, options: Optional[dict[str, Any]], *, weights_only: bool) -> dict[str, Any]:
        """What a checkpoint IO is told beside the state, from what `ModelCheckpoint.save` told the strategy."""
        options = options or {}
        manifest = Manifest(
            step=self.trainer.global_step,
            consumed_samples=self.consumed_samples,
            layout=self._layout_record(),
            metrics=options.get("metrics") or {},
            weights_only=weights_only,
            settings=settings_of(self.trainer),
            versions=versions(),
            **(options.get("run") or {}),
        )
        with_context = options.get("with_context", True)
        return {
            "manifest": manifest,
            "write_context": (lambda path: write_context(path, self.trainer)) if with_context else None,
            "published": options.get("published"),
        }

    def _take_up_position(self, checkpoint: Mapping[str, Any]) -> None:
        """When fitting: the random streams and the position in the data, where ``checkpoint`` has them."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        if "random_state" in checkpoint:
            load_random_state(checkpoint["random_state"])
        position = checkpoint.get("nemo2")
        if position is not None and self.data_sampler is not None and self.trainer.ckpt_path:
            self.data_sampler.load_state_dict(position)

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
            path,
            optimizer=self.restore_config.load_optim_state,
            model=self.restore_config.load_model_state,
            base=True,
        )
        # Neither its position in the data nor its random streams: this is another run.
        kept = {key: value for key, value in loaded.items() if key in ("model", "optimizer")}
        self.load_model_state_dict(kept, strict=True)
        _log.info("Started from the weights of %s.", path)

    def remove_checkpoint(self, filepath: Union[str, Path]) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(ckpt_to_dir(filepath))

    def teardown(self) -> None:
        """Finish what the checkpoint IO has begun. The groups stay, so that the model can be used; another layout replaces
        them."""
        self.checkpoint_io.teardown()
        graphs = getattr(getattr(self, "megatron_parallel", None), "graphs", None)
        if graphs is not None:
            graphs.close()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()


def paddings(module: Any, manifest: Optional[Manifest]) -> set[int]:
    """How many rows the vocabulary of ``module`` may have in a checkpoint, where they are filled up to a number that suits the
    tensor-parallel size; empty where the number is a setting. Without a manifest the usual sizes are thought of."""
    config, tokenizer = getattr(module, "config", None), getattr(module, "tokenizer", None)
    unit = getattr(config, "make_vocab_size_divisible_by", None)
    if tokenizer is None or unit is None or getattr(config, "vocab_size", None) is not None:
        return set()
    sizes = _USUAL_SIZES if manifest is None else [manifest.layout.get("tp", 1)]
    return {get_vocab_size(SimpleNamespace(tensor_model_parallel_size=tp), tokenizer.vocab_size, unit) for tp in sizes}


def versions() -> dict[str, str]:
    """Of what decides how a checkpoint looks, for its manifest."""
    return {name: importlib.metadata.version(name) for name in ("nemo2", "megatron-core", "torch", "lightning")}
