# SPDX-License-Identifier: Apache-2.0
"""What callbacks share that record some steps or some ranks: the checks of their arguments."""

import logging
from collections.abc import Sequence
from typing import Any, Optional

from nemo2.base.counts import count_problems, is_count

logger = logging.getLogger(__name__)


def step_range_problems(owner: str, start_step: Any, end_step: Any) -> list[str]:
    """Why ``[start_step, end_step)`` is not a range of steps, counted from 0. Empty for a valid range."""
    problems = [
        *count_problems(owner, least=0, start_step=start_step),
        *count_problems(owner, end_step=end_step),
    ]
    if not problems and end_step <= start_step:
        problems.append(
            f"{owner}.end_step={end_step} must be above start_step={start_step}, because recording ends before "
            "end_step."
        )
    return problems


def chosen_ranks(owner: str, ranks: Optional[Sequence[int]], problems: list[str]) -> list[int]:
    """The global ranks to act on; rank 0 for None. Appends a sentence to ``problems`` for each value that can't be a
    rank."""
    chosen = [0] if ranks is None else list(ranks)
    if not chosen:
        problems.append(f"{owner}.ranks=[] selects no rank. Name one, or leave it out for rank 0.")
    problems += [
        f"{owner}.ranks contains {rank!r}, which is not a rank. Ranks count from 0."
        for rank in chosen
        if not is_count(rank, least=0)
    ]
    return chosen


def warn_of_absent_ranks(owner: str, ranks: Sequence[int], trainer: Any) -> None:
    """Report on rank 0 the chosen ranks that the run doesn't have."""
    absent = [rank for rank in ranks if rank >= trainer.world_size]
    if absent and trainer.is_global_zero:
        logger.warning("%s.ranks=%s: this run has only %d ranks.", owner, absent, trainer.world_size)
