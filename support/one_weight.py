# SPDX-License-Identifier: Apache-2.0
"""The smallest Lightning run, with a recorder of what is logged."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

SHAPE = SimpleNamespace(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32)
SAMPLER = SimpleNamespace(current_global_batch_size=8, seq_len=64)


class Recorder(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.lines.append((step, dict(metrics)))


class OneWeight(pl.LightningModule):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        if config is not None:
            self.config = config

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Ones(pl.LightningDataModule):
    def __init__(self, sampler: Any) -> None:
        super().__init__()
        if sampler is not None:
            self.data_sampler = sampler

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(100, 1))  # pyright: ignore[reportArgumentType]


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Lightning's trainer on a CPU, which writes nothing by itself."""
    writes_nothing = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return pl.Trainer(**{"accelerator": "cpu", "log_every_n_steps": 1, **writes_nothing, **options})


def run(
    callback: pl.Callback, *, sampler: Any = None, config: Any = None, steps: int = 6, model: Any = None, every: int = 3
) -> list[tuple[int, dict[str, float]]]:
    """Step (from 0) and metrics of each line that ``steps`` steps log."""
    recorder = Recorder()
    trainer = quiet_trainer(max_steps=steps, log_every_n_steps=every, logger=recorder, callbacks=[callback])
    trainer.fit(model or OneWeight(config), datamodule=Ones(sampler))
    return [(step, {k: v for k, v in metrics.items() if k != "epoch"}) for step, metrics in recorder.lines]
