# SPDX-License-Identifier: Apache-2.0
"""Distributes an evaluation's work over the data-parallel replicas of a model."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron.core import parallel_state

from nemo2.base import ranks

_T = TypeVar("_T")
_R = TypeVar("_R")


def shared(items: Sequence[_T], answer: Callable[[Sequence[_T]], Sequence[_R]]) -> list[_R]:
    """The answers to ``items``, in order, on every rank. One replica computes each answer.

    With expert parallelism the replicas share their experts and must run together, so every replica computes all answers.
    """
    replicas = parallel_state.get_data_parallel_world_size()
    if replicas == 1 or parallel_state.get_expert_model_parallel_world_size() > 1:
        return list(answer(items)) if items else []
    rank = parallel_state.get_data_parallel_rank()
    mine = list(items[rank::replicas])
    parts = ranks.gather(list(answer(mine)) if mine else [], group=parallel_state.get_data_parallel_group())
    return [parts[place % replicas][place // replicas] for place in range(len(items))]
