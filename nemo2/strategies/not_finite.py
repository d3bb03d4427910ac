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
        match = _FOUND.search(str(error))
        if match is None:
            raise
        raise RuntimeFault(
            f"Step {step + 1}: this rank's gradients aren't finite ({match['what']}). This step changed no parameters "
            "and saved nothing. Run the same command again to resume from the last checkpoint. If the error recurs, lower "
            "optim.config.lr, lengthen the warm-up or set optim.config.clip_grad. To skip such steps, add the callback "
            "LossGuard(on_nonfinite='skip'). To find the operation, set trainer.detect_anomaly=True."
        ) from error
