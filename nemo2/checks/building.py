# SPDX-License-Identifier: Apache-2.0
"""Building the parts of a recipe that are nothing but settings, to see the values that they derive and what they refuse.

A model's configuration, the strategy, the precision, the optimizer's configuration, the schedule and the data module with its
tokenizer left out: none of them opens a file or a connection, or makes a process group.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional

import fiddle as fdl

from nemo2.errors import ConfigError

SETTINGS = (
    "model.config",
    "trainer.strategy",
    "trainer.plugins",
    "optim.config",
    "optim.lr_scheduler",
    "log.ckpt",
    "data",
)
"""Where in a recipe they are."""

# How Megatron-Core asks for Transformer Engine; the last is a comparison with the version of one that is not there.
_WANT_OF_TE = ("TE >=", "transformer-engine", "TransformerEngine", "'NoneType' and 'Version'")


@dataclass(frozen=True)
class Built:
    """What could be built, by its path, and what the others said."""

    objects: dict[str, Any] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """None where it could not be built, or isn't there."""
        return self.objects.get(path)


def build_settings(recipe: Any, *, here: bool) -> Built:
    """Build each part by itself, so that one that is refused does not hide the next."""
    built = Built()
    for path in SETTINGS:
        node = _at(recipe, path)
        if path == "data":
            node = _without_tokenizer(node)
        if not isinstance(node, fdl.Config):
            built.objects[path] = copy.copy(node)
            continue
        made, refusal = attempt(lambda n=node: fdl.build(n), here=here)
        if refusal is not None:
            built.refusals[path] = refusal
        elif made is not None:
            built.objects[path] = made
    return built


def attempt(step: Callable[[], Any], *, here: bool) -> tuple[Any, Optional[str]]:
    """What `step` gives, or why it is refused.

    For a job that runs elsewhere it is tried as if this machine could do everything that is asked for; where that fails, for
    Megatron-Core may miss a package that is there, with what this machine adjusts. Only what fails both ways is refused, and
    not even that where it is for want of Transformer Engine: then there is neither an object nor a refusal.
    """
    ways: list[AbstractContextManager[None]] = [nullcontext()] if here else [_elsewhere(), nullcontext()]
    refusals = []
    for way in ways:
        try:
            with quietly(), way:
                return step(), None
        except Exception as error:  # Megatron-Core asserts, raises ValueError, TypeError ...: all say that it won't do
            refusals.append(plain_message(error))
    unknown = not here and any(sign in refusal for refusal in refusals for sign in _WANT_OF_TE)
    return None, None if unknown else refusals[-1]


def as_asked(config: Any) -> Any:
    """A model configuration with what was asked for in place of what this machine can do; a copy."""
    asked = copy.copy(config)
    for name, adjustment in getattr(config, "adjustments", {}).items():
        setattr(asked, name, adjustment.asked)
    return asked


def plain_message(error: BaseException) -> str:
    """What an exception says, without what fiddle adds to it."""
    inner = error.args[0] if error.args else None
    if isinstance(inner, BaseException):
        error = inner
    text = str(error).partition("\n\nFiddle context:")[0].strip()
    return text if text or isinstance(error, ConfigError) else type(error).__name__


@contextmanager
def quietly() -> Iterator[None]:
    """Nothing is announced or warned of: these objects are looked at, not run."""
    from nemo2.models.gpt import unannounced

    with warnings.catch_warnings(), unannounced():
        warnings.simplefilter("ignore")
        yield


def _elsewhere() -> AbstractContextManager[None]:
    from nemo2.models.gpt import for_another_machine

    return for_another_machine()


def _at(recipe: Any, path: str) -> Optional[Any]:
    node = recipe
    for name in path.split("."):
        node = getattr(node, name, None)
        if node is None:
            return None
    if isinstance(node, list | tuple):
        return node[0] if len(node) == 1 else None
    return node


def _without_tokenizer(data: Any) -> Any:
    """Tokenizers read files; nothing else of a data module does before it is set up."""
    if not isinstance(data, fdl.Config):
        return data
    data = copy.copy(data)
    for name in ("tokenizer", "vocab_file", "merges_file"):
        if name in data.__arguments__:
            setattr(data, name, None)
    return data
