# SPDX-License-Identifier: Apache-2.0
"""What a step reports beside its loss: Megatron-Core's timers, and the step and samples behind a failure."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

from megatron.core import Timers

from nemo2.base import ranks
from nemo2.base.errors import RuntimeFault
from nemo2.data.batch_sampler import StepBatchSampler
from nemo2.mcore.optim.base import NONFINITE_ADVICE

_log = logging.getLogger(__name__)
_NONFINITE = re.compile(r"found (?P<what>NaN|Inf) in local grad norm")
_SHOWN_SAMPLES = 16


def timers_of(log_level: int) -> Optional[Timers]:
    """Timers of all parts up to ``log_level``. 1: a step's forward and backward and the work after them. 2: also
    each micro-batch. None for 0."""
    return Timers(log_level=log_level, log_option="minmax") if log_level else None


def log_timers(timers: Any, step: int) -> None:
    """Log, on rank 0, the smallest and largest time of a rank in each part since the last call, and reset the timers.

    Every rank must call it. Does nothing without timers.
    """
    if not isinstance(timers, Timers):
        return
    names = ranks.gather(list(timers._timers))  # stages time different parts
    report = timers.get_all_timers_string(list(dict.fromkeys(name for own in names for name in own)))
    if ranks.is_rank_zero() and report:
        _log.info("Up to step %d, %s", step, report)


@contextmanager
def nonfinite_gradients(step: int) -> Iterator[None]:
    """A context for a step's forward and backward, in which Megatron-Core raises for gradients that aren't finite
    (`check_for_nan_in_grad`). Its message names a bucket and an iteration -1.

    Args:
        step: The number of updates before this step.

    Raises:
        RuntimeFault: in place of Megatron-Core's error.
    """
    try:
        yield
    except RuntimeError as error:
        match = _NONFINITE.search(str(error))
        if match is None:
            raise
        raise RuntimeFault(
            f"Step {step + 1}: this rank's gradients aren't finite ({match['what']}). {NONFINITE_ADVICE}"
        ) from error


def samples_of_step(loader: Any, consumed_samples: int) -> str:
    """The samples of the current step's global batch, by their indices in the dataset where they are known."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, StepBatchSampler):
        return "of a loader with batches of its own"
    indices = sampler.samples_of_step(consumed_samples)
    dataset = getattr(loader, "dataset", None)
    if (members := getattr(dataset, "samples_in", None)) is not None:
        indices = [sample for row in indices for sample in members(row)]
    shown = ", ".join(map(str, indices[:_SHOWN_SAMPLES]))
    more = f" and {len(indices) - _SHOWN_SAMPLES} more" if len(indices) > _SHOWN_SAMPLES else ""
    return f"whose global batch has the samples {shown}{more} of the dataset (counted from 0)"
