# SPDX-License-Identifier: Apache-2.0
"""How many parameters a model has, counted from its config, without building it."""

from typing import Any

from nemo2.models.walker import shape_of


def count_parameters(config: Any, vocab_size: int) -> int:
    """Parameters of the whole model, over all ranks, tied embeddings counted once.

    ``config`` is a built ``GPTConfig`` or a config tree of one, of any family (`nemo2.models.walker`); ``vocab_size`` are
    the embedding's rows, with their padding if that is to be counted.
    """
    return shape_of(config, vocab_size).parameters
