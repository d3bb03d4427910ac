# SPDX-License-Identifier: Apache-2.0
"""Counts a model's parameters from its config, without building it."""

from typing import Any

from nemo2.models.walker import shape_of


def count_parameters(config: Any, vocab_size: int) -> int:
    """The parameters of the whole model, over all ranks, with tied embeddings counted once.

    ``config`` is a built ``GPTConfig`` or a config tree of one, of any family (`nemo2.models.walker`). ``vocab_size``
    is the number of the embedding's rows, including padding if it should count.
    """
    return shape_of(config, vocab_size).parameters
