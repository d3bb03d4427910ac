# SPDX-License-Identifier: Apache-2.0
"""``trainer.max_time``, counted from zero in each run."""

from typing import Any

from lightning.pytorch.callbacks import Timer


class RunTimer(Timer):
    """End training after this process has trained for a given time, so that each job of a chain continues the previous
    one.

    Lightning's timer includes the time of earlier runs. Once a run reaches the limit, running the same command again
    would end without a step. To get that behavior, add Lightning's `Timer` to the callbacks.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: no time is carried over."""
