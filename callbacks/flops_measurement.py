# SPDX-License-Identifier: Apache-2.0
"""Measures a run's model FLOP/s, and its MFU where the device's peak is known."""

import math
import time
from typing import Any, Optional

import lightning.pytorch as pl

from nemo2.base.backend import get_backend
from nemo2.base.counts import is_number
from nemo2.base.errors import ConfigError
from nemo2.callbacks.consumption import global_batch
from nemo2.config.capture import configurable
from nemo2.models.flops import model_flops_per_step


@configurable
class FLOPsMeasurementCallback(pl.Callback):
    """Log model FLOP/s and MFU on the steps that log.

    Each value covers all steps since the last logged step and includes the time between steps:

    - ``TFLOPS_per_GPU``: 10^12 model FLOPs per second and device. Recomputed operations count once.
    - ``TFLOPS``: the same for all devices together.
    - ``MFU``: the fraction of ``peak_tflops`` (PaLM, arXiv:2204.02311, appendix B), if ``peak_tflops`` is set.

    `TimingCallback` also logs ``tflops_per_gpu``. That value uses only the time inside steps and counts attention
    causally.

    Args:
        model_config: The source of the model's shape. None: the model of the run.
        data_config: The source of sequence length and batch size. None: the data of the run.
        model_name: Accepted for NeMo's signature. NeMo selects a formula by it, whereas nemo2 counts from the
            configuration.
        causal: Count only the attention scores that a causal model needs. False: count the whole square, NeMo 2.0's and
            PaLM's convention, which gives up to a third more at long sequences. See `nemo2.models.flops`.
        peak_tflops: The device's dense rate in 10^12 FLOP/s, such as 989 for bf16 on an H100 or H200 (data sheet).
            None: no MFU.

    Raises:
        ConfigError: the peak isn't positive, or a configuration has no shape. At the start of training: the shape of the model or
            the data is unknown.
    """

    only_one = True

    def __init__(
        self,
        model_config: Optional[Any] = None,
        data_config: Optional[Any] = None,
        model_name: Optional[str] = None,
        causal: bool = False,
        peak_tflops: Optional[float] = None,
    ) -> None:
        if peak_tflops is not None and not (is_number(peak_tflops) and 0 < peak_tflops < math.inf):
            raise ConfigError(
                f"FLOPsMeasurementCallback.peak_tflops={peak_tflops!r}: must be a positive number, for example 989."
            )
        if model_config is not None and not _is_transformer(model_config):
            raise ConfigError(
                f"FLOPsMeasurementCallback.model_config={model_config!r} is not the configuration of a transformer, with "
                "num_layers and num_attention_heads. Set one, or leave it unset for the model of the run."
            )
        if data_config is not None:
            _shape_of(data_config)
        self.model_config = model_config
        self.data_config = data_config
        self.model_name = model_name
        self.causal = causal
        self.peak_tflops = peak_tflops
        self._since: float | None = None
        self._flops = 0.0
        self._of_step = 0.0
        self._per_step: dict[tuple[int, int], float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since, self._flops = None, 0.0
        self._step_flops(trainer, pl_module)  # raises for an unknown shape before the first step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if self._since is None:
            self._since = self._now()
        self._of_step = self._step_flops(trainer, pl_module)  # after the step the sampler is at the next batch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        self._flops += self._of_step
        if self._since is None or not trainer._logger_connector.should_update_logs:
            return
        now = self._now()
        rate = self._flops / (now - self._since) / 1e12
        per_device = rate / trainer.world_size
        self._since, self._flops = now, 0.0
        pl_module.log("TFLOPS_per_GPU", per_device, prog_bar=True, batch_size=1)
        pl_module.log("TFLOPS", rate, batch_size=1)
        if self.peak_tflops is not None:
            pl_module.log("MFU", per_device / self.peak_tflops, batch_size=1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restart the measurement, because validation time is not training time."""
        self._since, self._flops = None, 0.0

    def _step_flops(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        shape = _shape_of(self.data_config) if self.data_config is not None else global_batch(trainer)
        if shape is None:
            raise ConfigError(
                "FLOPsMeasurementCallback needs a batch size and a sequence length, but the data has no data_sampler "
                "to read them from. Set data_config to an object with global_batch_size and seq_length."
            )
        if shape not in self._per_step:
            self._per_step[shape] = self._count(*shape, pl_module)
        return self._per_step[shape]

    def _count(self, batch_size: int, seq_length: int, pl_module: pl.LightningModule) -> float:
        config = self.model_config if self.model_config is not None else getattr(pl_module, "config", None)
        if not _is_transformer(config):
            raise ConfigError(
                f"FLOPsMeasurementCallback needs the configuration of a transformer, but {type(pl_module).__name__} "
                "has none. Set model_config, or remove the callback."
            )
        rows = getattr(pl_module, "padded_vocab_size", None)
        return model_flops_per_step(config, seq_length, batch_size, vocab_size=rows, causal=self.causal)

    @staticmethod
    def _now() -> float:
        get_backend().synchronize()
        return time.perf_counter()


def _is_transformer(config: Any) -> bool:
    return bool(getattr(config, "num_layers", None) and getattr(config, "num_attention_heads", None))


def _shape_of(data: Any) -> tuple[int, int]:
    """The samples of a global batch and the tokens of a sample, from the fields of a data module."""
    missing = [name for name in ("global_batch_size", "seq_length") if not isinstance(getattr(data, name, None), int)]
    if missing:
        raise ConfigError(
            f"FLOPsMeasurementCallback.data_config has no {' and no '.join(missing)}. Set them to whole numbers."
        )
    return data.global_batch_size, data.seq_length
