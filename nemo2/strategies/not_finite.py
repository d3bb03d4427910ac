# SPDX-License-Identifier: Apache-2.0
"""Rewords the error for gradients that aren't finite. Megatron-Core's message names a bucket and an iteration -1."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from nemo2.errors import RuntimeFault

_FOUND = re.compile(r"found (?P<what>NaN|Inf) in local grad norm")


@contextmanager
def not_finite_in_our_words(step: int) -> Iterator[None]:
    """A context for a step's forward and backward, in which Megatron-Core raises for gradients that aren't finite
    (`check_for_nan_in_grad`).

    Args:
        step: The number of updates before this step.

    Raises:
        RuntimeFault: in place of Megatron-Core's error.
    """
    try:
        yield
    except RuntimeError as error:
        found = _FOUND.search(str(error))
        if found is None:
            raise
        raise RuntimeFault(
            f"Step {step + 1}: this rank's gradients aren't finite ({found['what']}). Nothing was updated or saved with them; "
            "the same command goes on from the last checkpoint. If it happens there again: lower optim.config.lr or lengthen the "
            "warm-up, check that optim.config.clip_grad is set, leave such steps out with the callback "
            "LossGuard(on_nonfinite='skip'), or find the operation with trainer.detect_anomaly=True."
        ) from error
