# SPDX-License-Identifier: Apache-2.0
"""One training run of the table through the users' stack, on each rank of `support.ranks.run`.

`reference` trains the whole model in one process and leaves its first weights and gradients; `layout` starts from those
weights, sharded its own way, and compares its gradients with them.
"""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from support import gradients, moments
from tests.long.parity import models, reordered

WEIGHTS, GRADIENTS = "weights", "gradients.pt"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training: its model, layout and data. Everything in it is plain data."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    """The layout's own settings of the model."""
    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of `nemo2.MegatronStrategy`, or of the strategy that ``kind`` names."""
    ddp: dict[str, Any] = field(default_factory=dict)
    zero: bool = False
    """The distributed optimizer (ZeRO-1)."""
    precision: str = "32"
    micro_batch_size: int = 2
    steps: int = models.STEPS
    variation: dict[str, Any] = field(default_factory=dict)
    """Arguments of `reordered.products`, to see how much rounding alone does to one process."""


def reference(run: Run, folder: str) -> dict[str, Any]:
    """Train in one process. Writes first weights and gradients into ``folder``."""

    def before(trainer: Any) -> None:
        path = Path(folder) / WEIGHTS
        trainer.strategy.save_checkpoint(
            trainer._checkpoint_connector.dump_checkpoint(weights_only=True),
            path,
            storage_options={"with_context": False},
        )

    def first_gradients(trainer: Any) -> dict[str, Any]:
        whole = gradients.whole_gradients(_megatrons(trainer))
        torch.save(whole, Path(folder) / GRADIENTS)
        return {"parameters": len(whole)}

    return _train(run, weights=None, before=before, first_gradients=first_gradients)


def layout(run: Run, reference_folder: str) -> dict[str, Any]:
    """Train over all the ranks there are, from the reference's weights. ``errors`` is the relative difference of each
    parameter's gradient at the first step, the same on every rank."""

    def first_gradients(trainer: Any) -> dict[str, Any]:
        whole = gradients_in(Path(reference_folder))
        found = gradients.differences(_pieces(trainer, whole), whole)
        everybodys: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybodys, found)
        return {"errors": gradients.relative_errors([item for rank in everybodys for item in rank], whole)}

    return _train(run, weights=str(Path(reference_folder) / WEIGHTS), first_gradients=first_gradients)


def in_another_order(run: Run, reference_folder: str) -> dict[str, Any]:
    """Train in one process from the reference's weights; ``gradients`` are those of the first step, by name."""

    def first_gradients(trainer: Any) -> dict[str, Any]:
        return {"gradients": gradients.whole_gradients(_megatrons(trainer))}

    return _train(run, weights=str(Path(reference_folder) / WEIGHTS), first_gradients=first_gradients)


def gradients_in(reference_folder: Path) -> dict[gradients.Name, dict[str, Any]]:
    """Gradients of the first step that `reference` wrote, by name."""
    return torch.load(reference_folder / GRADIENTS, map_location="cuda" if torch.cuda.is_available() else "cpu")


def _train(
    run: Run,
    *,
    weights: str | None,
    first_gradients: Callable[[Any], dict[str, Any]],
    before: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    _quiet()
    from megatron.core.distributed import DistributedDataParallelConfig

    import nemo2 as nl
    from nemo2.checkpoint.auto_resume import RestoreConfig

    options: dict[str, Any] = {"kind": "MegatronStrategy"} | run.strategy
    kind = options.pop("kind")
    if weights is not None:
        options["restore_config"] = RestoreConfig(path=weights)
    if kind == "MegatronStrategy":
        ddp: dict[str, Any] = {"check_for_nan_in_grad": True} | run.ddp
        options["ddp"] = DistributedDataParallelConfig(**ddp)
        options["ckpt_async_save"] = False
    model = models.build_model(run.model, run.config, optimizer={"use_distributed_optimizer": run.zero})
    recorder = Recorder(first_gradients, before)
    trainer = nl.Trainer(
        devices=torch.distributed.get_world_size(),
        max_steps=run.steps,
        strategy=getattr(nl, kind)(**options),
        plugins=nl.MegatronMixedPrecision(run.precision),
        callbacks=[recorder],
        log_every_n_steps=1,
        limit_val_batches=0,
        enable_progress_bar=False,
        default_root_dir=tempfile.gettempdir(),
    )
    with reordered.products(**run.variation):
        trainer.fit(model, Data(run))
    assert len(recorder.losses) == run.steps, f"{len(recorder.losses)} of {run.steps} steps were done"
    return {"losses": recorder.losses, "grad_norms": recorder.grad_norms} | recorder.first


def _pieces(trainer: Any, whole: dict[gradients.Name, dict[str, Any]]) -> Iterable[gradients.Piece]:
    """This rank's gradients of the first step, before clipping."""
    if moments.holds_gradients(trainer.strategy):
        return _megatrons(trainer)
    optimizer = trainer.lightning_module.optim.config
    clipping = moments.clipped(float(trainer.callback_metrics["grad_norm"]), optimizer.clip_grad)
    pieces = moments.pieces_of(trainer.strategy, whole, factor=(1 - optimizer.adam_beta1) * clipping)
    return gradients.without_padding(pieces, _token_ids(trainer))


def _megatrons(trainer: Any) -> Iterable[gradients.Piece]:
    """This rank's gradients as Megatron-Core's buffers have them."""
    pieces = gradients.pieces_of(trainer.strategy.megatron_parallel)
    return gradients.without_padding(pieces, _token_ids(trainer))


def _token_ids(trainer: Any) -> int:
    module = trainer.lightning_module
    return module.config.num_token_ids(module.tokenizer)


class Recorder(pl.Callback):
    """Losses and gradient norms as they are logged, and the first step's gradients before they are clipped."""

    def __init__(self, first_gradients: Callable[[Any], dict[str, Any]], before: Callable[[Any], None] | None) -> None:
        self.first_gradients = first_gradients
        self.before = before
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.first: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.before is not None:
            self.before(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.first and moments.holds_gradients(trainer.strategy):
            self.first = self.first_gradients(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.first:
            self.first = self.first_gradients(trainer)
        self.losses.append(float(trainer.callback_metrics["reduced_train_loss"]))
        self.grad_norms.append(float(trainer.callback_metrics["grad_norm"]))


class Samples(Dataset):
    """`models.sample`, for as many steps as a run has."""

    def __init__(self, run: Run) -> None:
        self.size = run.steps * models.GLOBAL_BATCH
        self.model = models.MODELS[run.model]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return models.sample(index, packed=self.model.packed, tokens=self.model.tokens)


class Data(pl.LightningDataModule):
    def __init__(self, run: Run) -> None:
        from nemo2.data.sampler import MegatronDataSampler

        super().__init__()
        self.samples = Samples(run)
        self.data_sampler = MegatronDataSampler(
            seq_len=models.SEQ, micro_batch_size=run.micro_batch_size, global_batch_size=models.GLOBAL_BATCH
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples)


def _quiet() -> None:
    """Other libraries' notices, once per rank and run, would drown the table."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "megatron", "nemo2"):
        logging.getLogger(name).setLevel(logging.ERROR)
