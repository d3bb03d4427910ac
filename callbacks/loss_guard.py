# SPDX-License-Identifier: Apache-2.0
"""Stops the run or skips an update when the loss isn't finite or jumps."""

import logging
import math
import statistics
from collections import deque
from typing import Any, Literal, Optional

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from nemo2.base import ranks
from nemo2.base.counts import is_number, require_counts
from nemo2.base.errors import ConfigError, RuntimeFault
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable
from nemo2.config.provenance import adjust

_log = logging.getLogger(__name__)
_POLICIES = ("stop", "skip")


@configurable
class LossGuard(pl.Callback):
    """Check each step's loss before the update, and stop the run or skip the update if the loss is bad.

    Every rank sees the same loss. The two actions are:

    - "stop" raises before the update. The parameters remain those of the previous step, and the checkpoints stay
      unchanged.
    - "skip" leaves out the update. Parameters, moments and schedule stay as they were, but the batch's samples count as
      consumed. A resumed run skips the same steps.

    With "skip" the callback also checks the gradients, which costs one pass over them per step, and turns off
    Megatron-Core's own check (``strategy.ddp_config.check_for_nan_in_grad``), which would end the run. With fp16 the
    loss scaler checks the gradients instead, which are often infinite until it has found its scale.

    Independently of this callback, nemo2 never publishes a checkpoint with parameters that aren't finite.

    Args:
        on_nonfinite: The action for a loss, or with "skip" for gradients, that is NaN or infinite.
        on_spike: The action for a loss above ``spike_factor`` times the median of the last ``window`` good losses.
            None: no action.
        spike_factor: The factor of a spike, above 1.
        window: The number of steps in the median. Spikes are detected once this many losses exist.
        max_skips: The number of consecutive skipped steps after which the run stops.

    Raises:
        ConfigError: a setting that can't work.
        RuntimeFault: the action is "stop", or too many consecutive steps were skipped.
    """

    def __init__(
        self,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        on_spike: Optional[Literal["stop", "skip"]] = None,
        spike_factor: float = 2.0,
        window: int = 50,
        max_skips: int = 10,
    ) -> None:
        for name, value in (("on_nonfinite", on_nonfinite), ("on_spike", on_spike)):
            if value not in _POLICIES and (name, value) != ("on_spike", None):
                raise ConfigError(
                    f"LossGuard.{name}={value!r}: must be 'stop' or 'skip'{did_you_mean(str(value), _POLICIES, listed=True)}"
                )
        if not (is_number(spike_factor) and 1 < spike_factor < math.inf):  # NaN too
            raise ConfigError(
                f"LossGuard.spike_factor={spike_factor!r}: must be a number above 1. Otherwise every step or none "
                "would be a spike."
            )
        require_counts("LossGuard", window=window, max_skips=max_skips)
        self.on_nonfinite = on_nonfinite
        self.on_spike = on_spike
        self.spike_factor = spike_factor
        self.window = window
        self.max_skips = max_skips
        self.skipped: list[int] = []
        """The steps since the start of the run whose update was skipped."""
        self._losses: deque[float] = deque(maxlen=window)
        self._in_a_row = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        ddp: Any = getattr(trainer.strategy, "ddp_config", None)
        if self.on_nonfinite == "skip" and getattr(ddp, "check_for_nan_in_grad", False):
            # All shipped recipes set the check, so it is no contradiction of the user's.
            adjust(ddp, "check_for_nan_in_grad", False, why="LossGuard(on_nonfinite='skip') looks at the gradients")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        loss = trainer.strategy.last_loss  # pyright: ignore[reportAttributeAccessIssue]
        problem, policy = self._judge(float(loss))
        scaled = getattr(optimizer, "loss_scale", None) is not None  # the scaler skips the update and lowers its scale
        if problem is None and self.on_nonfinite == "skip" and not scaled and not _gradients_finite(trainer):
            problem, policy = "its gradients are not finite", self.on_nonfinite
        if problem is None:
            self._in_a_row = 0
            self._losses.append(float(loss))
            return
        where = f"Step {trainer.global_step + 1}: {problem}"
        if policy == "stop":
            raise RuntimeFault(
                f"{where}. This step changed and saved nothing. Restart from the last checkpoint with another "
                "learning rate or other data, or skip such steps with LossGuard(on_nonfinite='skip', "
                "on_spike='skip')."
            )
        self._in_a_row += 1
        if self._in_a_row > self.max_skips:
            raise RuntimeFault(
                f"{where}, as in the {self.max_skips} steps before it, so training does not recover by itself."
            )
        self.skipped.append(trainer.global_step + 1)
        trainer.strategy.skip_update()  # pyright: ignore[reportAttributeAccessIssue]
        _log.warning("%s. The update is skipped.", where)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses = deque(state_dict["losses"], maxlen=self.window)
        self.skipped = list(state_dict["skipped"])
        self._in_a_row = state_dict["in_a_row"]

    def _judge(self, loss: float) -> tuple[Optional[str], Optional[str]]:
        if not math.isfinite(loss):
            return f"the loss is {loss}", self.on_nonfinite
        if self.on_spike is not None and len(self._losses) == self.window:
            median = statistics.median(self._losses)
            if loss > self.spike_factor * median:
                return (
                    f"the loss is {loss:.4g}, {loss / median:.3g} times the median of {self.window} steps",
                    self.on_spike,
                )
        return None, None


def _gradients_finite(trainer: pl.Trainer) -> bool:
    """Whether all gradients on all ranks are finite. Every rank gets the same answer."""
    model: Any = trainer.model
    gradients = (getattr(parameter, "main_grad", parameter.grad) for parameter in model.parameters())
    # This rank's shard, if the gradient is sharded.
    held = (gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients)
    flags = [gradient.isfinite().all() for gradient in held if gradient is not None]
    finite = torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)
    return not ranks.largest((~finite).to(dtype=torch.int32, device=trainer.strategy.root_device).reshape(1))
