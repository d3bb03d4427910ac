# SPDX-License-Identifier: Apache-2.0
"""Small runs under the strategies that shard parameters, and the trained tensors gathered from all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from support import collectives, moments, small_runs

Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
"""The name, the position, the shape of the whole tensor, and the part itself."""
BETA1 = 0.9


def strategies() -> dict[str, Callable[..., Any]]:
    from megatron.core.distributed import DistributedDataParallelConfig

    import nemo2 as nl

    def megatron(kind: str) -> Callable[..., Any]:
        def make(**options: Any) -> Any:
            # Averaged as most recipes' gradients are.
            ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy=kind, average_in_collective=True)
            return nl.MegatronStrategy(fsdp="megatron", ddp=ddp, ckpt_async_save=False, **options)

        return make

    return {
        "FSDP2Strategy": nl.FSDP2Strategy,
        "FSDPStrategy": nl.FSDPStrategy,
        "Megatron-FSDP": megatron("optim_grads_params"),
        "Megatron-FSDP, ZeRO-2": megatron("optim_grads"),
        "Megatron-FSDP, ZeRO-1": megatron("optim"),
        "MegatronStrategy": lambda **options: nl.MegatronStrategy(ckpt_async_save=False, **options),
    }


class FirstGradients(pl.Callback):
    """The gradients of the first step as they stand in Adam's first moment, under the names they are stored by."""

    def __init__(self) -> None:
        self.pieces: Pieces = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Takes the gradients of a model that isn't sharded from Megatron-Core's gradient buffers."""
        from nemo2.checkpoint.shards import stored_shards
        from nemo2.mcore.parallel.stored_names import stored_names

        if self.pieces or not moments.holds_gradients(trainer.strategy):
            return
        core = trainer.strategy.megatron_parallel.unwrapped[0]
        names = stored_names(core)
        for name, parameter in core.named_parameters():
            moment = parameter.main_grad.float() * (1 - BETA1)
            self._add(stored_shards(names[name], moment, prefix=moments.KEY))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.pieces:
            self._add(moments.first_moments(trainer.strategy))

    def _add(self, pieces: Any) -> None:
        self.pieces += [
            (piece.key, tuple(piece.offset), tuple(piece.global_shape), piece.tensor.clone()) for piece in pieces
        ]


def whole(ranks: list[Pieces]) -> dict[str, Tensor]:
    """The stored tensors, from the pieces of all ranks. NaN where no rank has a piece."""
    tensors: dict[str, Tensor] = {}
    for key, offset, shape, part in (piece for pieces in ranks for piece in pieces):
        into = tensors.setdefault(key, torch.full(shape, torch.nan))
        place = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
        into[place] = part
    return tensors


def train(
    kind: str,
    *,
    steps: int = 4,
    precision: str = "32",
    save: str | Path | None = None,
    save_every: int | None = None,
    ckpt_path: str | Path | None = None,
    strategy: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A tiny Llama trained under a strategy. ``save``: the checkpoint of the last step goes there, as ``step=N``, and
    those of every ``save_every`` steps."""
    from nemo2.mcore.precision import MegatronMixedPrecision
    from nemo2.training.trainer import Trainer

    small_runs.quiet()
    recorder, gradients = small_runs.Recorder(), FirstGradients()
    callbacks: list[Any] = [recorder, gradients]
    if save is not None:
        every = {"every_n_train_steps": save_every, "save_top_k": -1} if save_every else {}
        callbacks.append(small_runs.keep(save, **every))
    trainer = Trainer(
        devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        max_steps=steps,
        strategy=strategies()[kind](**(strategy or {})),
        plugins=MegatronMixedPrecision(precision),
        callbacks=callbacks,
        log_every_n_steps=1,
        limit_val_batches=1,
        val_check_interval=steps,
        enable_progress_bar=False,
    )
    options: dict[str, Any] = {"distributed": True, "optimizer": {"log_num_zeros_in_grad": True}}
    model = small_runs.build_llama(schedule=small_runs.cosine(8), **options | config)
    try:
        with collectives.watched() as watch:
            trainer.fit(model, small_runs.TokenData(), ckpt_path=ckpt_path)
    finally:
        small_runs.release()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "losses": recorder.losses,
        "norms": recorder.grad_norms,
        "val_losses": recorder.val_losses,
        "gradients": gradients.pieces,
        "metrics": metrics,
        "watch": {"problems": watch.problems, "collectives": watch.seen, "resized": watch.resized},
    }
