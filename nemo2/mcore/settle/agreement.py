# SPDX-License-Identifier: Apache-2.0
"""What a model and its data share: the sequence length, the kind of loss, the tokenizer."""

from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.config.provenance import adjust
from nemo2.config.requested import explicit_fields
from nemo2.config.walk import class_of


def length_problem(config: Any, data: Any) -> Optional[str]:
    """Why the lengths that were set on the model and on its data contradict each other. None: they don't.

    Args:
        config: The model's configuration, as an object.
        data: The data module, or its node in a recipe.
    """
    length = getattr(data, "seq_length", None)
    if not length or "seq_length" not in explicit_fields(config) or config.seq_length == length:
        return None
    return (
        f"model.config.seq_length={config.seq_length} contradicts data.seq_length={length}. Remove "
        "model.config.seq_length: the model takes the sequence length from the data."
    )


def follow_the_data(config: Any, data: Any) -> None:
    """Copy settings from the data to the model, unless they are set on the model.

    They are the sequence length, and whether the loss is the mean over the tokens of the global batch, which samples
    with masks need.

    Args:
        data: The data module, or its node in a recipe.
    """
    explicit = explicit_fields(config)
    length = getattr(data, "seq_length", None)
    if length and hasattr(config, "seq_length") and "seq_length" not in explicit:
        adjust(config, "seq_length", length, why="data.seq_length")
    kind = getattr(data, "__fn_or_cls__", type(data))
    per_token = getattr(kind, "calculate_per_token_loss", False) and hasattr(config, "calculate_per_token_loss")
    if per_token and "calculate_per_token_loss" not in explicit:
        adjust(config, "calculate_per_token_loss", True, why=f"data is a {kind.__name__}: each token counts the same")


def tokenizer_choice(recipe: Any) -> Any:
    """The argument ``tokenizer`` of `share_tokenizer` for a configured entry point."""
    return "data" if getattr(class_of(recipe), "__name__", "") == "pretrain" else getattr(recipe, "tokenizer", None)


def share_tokenizer(model: Any, data: Any, tokenizer: Any) -> None:
    """Let ``model`` and ``data`` share a tokenizer as `llm.train` describes its argument ``tokenizer``.

    Raises:
        ConfigError: another text.
    """
    if tokenizer is None:
        if getattr(model, "tokenizer", None) is None:
            model.tokenizer = getattr(data, "tokenizer", None)
        return
    if tokenizer == "data":
        model.tokenizer = getattr(data, "tokenizer", None)
    elif tokenizer == "model" and getattr(model, "tokenizer", None) is not None:
        data.tokenizer = model.tokenizer
    elif tokenizer == "model":
        model.tokenizer = getattr(data, "tokenizer", None)  # the only tokenizer
    elif isinstance(tokenizer, str):
        raise ConfigError(f"tokenizer={tokenizer!r}: must be 'data', 'model' or a tokenizer.")
    else:
        model.tokenizer = data.tokenizer = tokenizer
