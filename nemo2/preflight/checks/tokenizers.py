# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that a run would train with, as far as this machine can tell without a network."""

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fiddle as fdl

from nemo2.base.errors import ConfigError, Nemo2Error
from nemo2.base.noise import silenced
from nemo2.checkpoint.paths import HUGGING_FACE, missing
from nemo2.data.tokenizer_files import FIELDS, files_of
from nemo2.mcore.settle.agreement import share_tokenizer, tokenizer_choice
from nemo2.preflight.checks.facts import Facts


class Unknown:
    """A tokenizer that only a download or the cluster could show."""


def tokenizer_of(facts: Facts, part: str = "model") -> Any:
    """The tokenizer of the run's model or data ("model", "data"). None: it has none, or it is unknown."""
    tokenizer = known_tokenizer(facts, part)
    return None if isinstance(tokenizer, Unknown) else tokenizer


def known_tokenizer(facts: Facts, part: str = "model") -> Any:
    """The tokenizer of the run's model or data, by the same functions that connect a run's parts. `Unknown`: its files
    aren't on this machine. None: the run has none.

    Raises:
        Nemo2Error: a tokenizer can't be built.
    """
    recipe = facts.recipe
    model = SimpleNamespace(tokenizer=_built(facts.at("model.tokenizer"), facts))
    own, module = _built(facts.at("data.tokenizer"), facts), facts.parts.get("data")
    if own is None:  # a data module that is refused might have made one
        own = Unknown() if module is None and facts.data is not None else known_by_size(module)
    data = SimpleNamespace(tokenizer=own)
    choice = tokenizer_choice(recipe)
    share_tokenizer(model, data, choice if choice is None or isinstance(choice, str) else _built(choice, facts))
    restore = getattr(getattr(recipe, "resume", None), "restore_config", None)
    path = str(getattr(restore, "path", None) or "")
    if path and getattr(restore, "load_artifacts", True):
        folder = path.removeprefix(HUGGING_FACE)
        here = folder.startswith("/") and Path(folder).is_dir() if path.startswith(HUGGING_FACE) else not missing(path)
        if not here:
            return Unknown()
        from nemo2.checkpoint.tokenizers import take_tokenizer

        with silenced(take_tokenizer.__module__):  # the run itself reports replaced tokenizers
            take_tokenizer(path, model, data)
    return getattr(model if part == "model" else data, "tokenizer", None)


def known_by_size(data: Any) -> Any:
    """The tokenizer that a data module made itself. One that is made on first use, from files that may not exist yet, is
    known by its size only. None: it made none."""
    tokenizer = vars(data).get("tokenizer") if data is not None else None
    size = getattr(data, "vocab_size", None)
    on_first_use = isinstance(getattr(type(data), "tokenizer", None), property | cached_property)
    return SimpleNamespace(vocab_size=size) if tokenizer is None and on_first_use and size else tokenizer


def _built(tokenizer: Any, facts: Facts) -> Any:
    """The tokenizer of a config. `Unknown`: it is a name on the hub, or its files are on the machine of the run."""
    if tokenizer is None or isinstance(tokenizer, str):
        return None
    named = {field: value for field in FIELDS if (value := getattr(tokenizer, field, None)) is not None}
    for field, value in named.items():
        if not Path(str(value)).expanduser().exists():
            if field == "pretrained_model_name" or not facts.here:
                return Unknown()
            raise ConfigError(
                f"The tokenizer has {field}={value}, which does not exist. Set the path of an existing file."
            )
    if getattr(tokenizer, "trust_remote_code", False):
        return Unknown()  # a check runs no code of a tokenizer's folder
    try:
        built = fdl.build(tokenizer) if isinstance(tokenizer, fdl.Buildable) else tokenizer
    except Exception as error:  # any error of a user's class
        cause = error.args[0] if error.args and isinstance(error.args[0], Nemo2Error) else error
        raise ConfigError(f"The tokenizer {tokenizer!r} can't be built: {cause}") from error
    return built if not named or files_of(built) else Unknown()
