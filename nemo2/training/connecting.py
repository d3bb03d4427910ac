# SPDX-License-Identifier: Apache-2.0
"""Connects the parts of a run, so that they share one sequence length, loss, tokenizer, optimizer and transform."""

from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.parallel.transform import refuse_two_transforms
from nemo2.mcore.settle.agreement import follow_the_data, length_problem, share_tokenizer


def connect_parts(
    model: Any,
    data: Any,
    *,
    optim: Optional[OptimizerModule] = None,
    tokenizer: Any = None,
    model_transform: Optional[Any] = None,
) -> None:
    """Let the parts of a run share one sequence length, loss, tokenizer, optimizer and transform. Computes nothing.

    Args:
        optim: The model's optimizer. None: its own.
        tokenizer: "data" or "model": both use this part's tokenizer. A tokenizer object: both use it. None: both keep
            their own. With "model" and None, a model without a tokenizer takes the data's.
        model_transform: The model's transform. None: its own, if any.

    Raises:
        ConfigError: two parts contradict each other.
    """
    config = getattr(model, "config", None)
    if problem := length_problem(config, data):
        raise ConfigError(problem, rule="one-sequence-length")
    if config is not None:
        follow_the_data(config, data)
    share_tokenizer(model, data, tokenizer)
    own = getattr(model, "model_transform", None)
    if model_transform is not None and model_transform is not own:
        transforms = {"model_transform": model_transform, "model.model_transform": own}
        refuse_two_transforms({place: transform for place, transform in transforms.items() if transform is not None})
        model.model_transform = model_transform
    if optim is not None:
        optim.connect(model)
