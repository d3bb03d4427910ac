# SPDX-License-Identifier: Apache-2.0
"""Connects the parts of a run, so that they share one sequence length, loss, tokenizer, optimizer and transform."""

from typing import Any, Optional

from nemo2.config.requested import explicit_fields
from nemo2.errors import ConfigError
from nemo2.mcore.optim.base import OptimizerModule
from nemo2.mcore.parallel.transform import refuse_two_transforms
from nemo2.mcore.settle.agreement import follow_the_data, share_tokenizer


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
    _follow_data(model, data)
    share_tokenizer(model, data, tokenizer)
    _share_transform(model, model_transform)
    if optim is not None:
        optim.connect(model)


def _follow_data(model: Any, data: Any) -> None:
    """Give the model the data's sequence length, unless both were set, and the data's kind of loss.

    Raises:
        ConfigError: both lengths were set, and differ.
    """
    config: Any = getattr(model, "config", None)
    length = getattr(data, "seq_length", None)
    if config is None:
        return
    if length is not None and "seq_length" in explicit_fields(config) and config.seq_length != length:
        raise ConfigError(
            f"model.config.seq_length={config.seq_length} contradicts data.seq_length={length}. Remove "
            "model.config.seq_length: the model takes the sequence length from the data."
        )
    follow_the_data(config, data)


def _share_transform(model: Any, model_transform: Any) -> None:
    """Set the model's transform.

    Raises:
        ConfigError: the model has a different one.
    """
    if model_transform is None:
        return
    own = getattr(model, "model_transform", None)
    if model_transform is own:
        return
    transforms = {"model_transform": model_transform, "model.model_transform": own}
    refuse_two_transforms({place: transform for place, transform in transforms.items() if transform is not None})
    model.model_transform = model_transform
