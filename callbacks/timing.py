# SPDX-License-Identifier: Apache-2.0
"""Logs seconds per training step, tokens per second and FLOP/s."""

import time
from collections import deque
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.base.backend import get_backend
from nemo2.base.counts import require_counts
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.callbacks.consumption import global_batch
from nemo2.config.capture import configurable

_TIMER_SETTINGS = ("reduction", "sync_cuda", "buffer_size")


@configurable
class TimingCallback(pl.Callback):
    """Log the speed of training on the steps that log, on every rank. Other steps read the clock twice.

    - ``train_step_timing in s``: seconds per step, the mean since the last logged step. A step lasts from Lightning's
      batch start to its batch end, without waiting for data, validation and checkpoints.
    - ``tokens_per_second``: the tokens of the global batch over that time, for all devices together. As in NeMo and
      torchtitan, they are its samples times the sequence length: padding counts too.
    - ``tflops_per_gpu``: model FLOP/s per device, with attention counted causally (see ``nemo2.models.flops``). On GPUs
      only.
    - ``tokens_per_sec_per_gpu``: tokens per second and device, with ``log_tokens_per_sec``.

    The last three need a data sampler that knows the batch size and the sequence length, and a model with a GPT's
    shape.

    Args:
        log_tokens_per_sec: Also log ``tokens_per_sec_per_gpu``.
        timer_kwargs: Settings of the timer, under NeMo's names. ``sync_cuda`` waits for the device before each clock
            reading, which is exact but slower. ``buffer_size`` averages over that many last steps instead.
            ``reduction`` must be ``"mean"``. None: no settings.

    Raises:
        ConfigError: an unknown or invalid timer setting.
    """

    def __init__(self, log_tokens_per_sec: bool = False, timer_kwargs: Optional[dict[str, Any]] = None):
        settings = dict(timer_kwargs or {})
        for name in settings:
            if name not in _TIMER_SETTINGS:
                raise ConfigError(
                    f"TimingCallback.timer_kwargs has no setting {name!r}{did_you_mean(name, _TIMER_SETTINGS)}"
                )
        if settings.get("reduction", "mean") != "mean":
            raise ConfigError(f"TimingCallback.timer_kwargs['reduction']={settings['reduction']!r}: must be 'mean'.")
        buffer_size = settings.get("buffer_size")
        require_counts("TimingCallback.timer_kwargs", others=(None,), buffer_size=buffer_size)
        self.log_tokens_per_sec = log_tokens_per_sec
        self.timer_kwargs = settings
        self._steps: deque[tuple[float, Optional[tuple[int, int]]]] = deque(maxlen=buffer_size)
        """The seconds and the batch of each step that the next logged values average over."""
        self._started: tuple[float, Optional[tuple[int, int]]] | None = None
        self._flops: dict[tuple[int, int], float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        # The batch is read here, because after the step the sampler is at the next one.
        self._started = self._now(), global_batch(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if self._started is None:
            return
        began, shape = self._started
        self._steps.append((self._now() - began, shape))
        self._started = None
        if not trainer._logger_connector.should_update_logs:
            return
        steps = list(self._steps)
        if self._steps.maxlen is None:
            self._steps.clear()
        seconds = sum(duration for duration, _ in steps)
        pl_module.log("train_step_timing in s", seconds / len(steps), prog_bar=True, batch_size=1)
        shapes = [shape for _, shape in steps if shape is not None]
        for name, value in self._rates(trainer, pl_module, shapes, seconds).items():
            pl_module.log(name, value, batch_size=1)

    def _rates(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, shapes: list[tuple[int, int]], seconds: float
    ) -> dict[str, float]:
        """The rates of steps with batches of these shapes, which took ``seconds`` together."""
        if not shapes:
            return {}
        tokens_per_second = sum(batch_size * seq_length for batch_size, seq_length in shapes) / seconds
        rates = {"tokens_per_second": tokens_per_second}
        if self.log_tokens_per_sec:
            rates["tokens_per_sec_per_gpu"] = tokens_per_second / trainer.world_size
        config = getattr(pl_module, "config", None)
        # CPUs have no known peak rate, so the value would say nothing.
        on_gpu = trainer.strategy.root_device.type != "cpu"
        if on_gpu and getattr(config, "num_layers", None) and getattr(config, "num_attention_heads", None):
            from nemo2.models.flops import model_flops_per_step

            rows = getattr(pl_module, "padded_vocab_size", None)
            for batch_size, seq_length in set(shapes) - self._flops.keys():
                flops = model_flops_per_step(config, seq_length, batch_size, vocab_size=rows)
                self._flops[batch_size, seq_length] = flops
            total = sum(self._flops[shape] for shape in shapes)
            rates["tflops_per_gpu"] = total / seconds / trainer.world_size / 1e12
        return rates

    def _now(self) -> float:
        if self.timer_kwargs.get("sync_cuda", False):
            get_backend().synchronize()
        return time.perf_counter()
