# SPDX-License-Identifier: Apache-2.0
"""``trainer.max_time``, counted anew by each run."""

from typing import Any

from lightning.pytorch.callbacks import Timer


class RunTimer(Timer):
    """Ends training after this process has trained for a while, so that a chain of jobs goes on from one to the next.

    Lightning's own counts the time of the runs before, too: from the first that reached the limit on, the same command would
    end at once, without a step. Whoever wants that adds Lightning's `Timer` to the callbacks.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is taken over."""
