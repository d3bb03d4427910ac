# SPDX-License-Identifier: Apache-2.0
"""A sample: token ids, and a flag for each trained token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, TypeVar

from nemo2.data.documents import surrogate_in
from nemo2.errors import ConfigError, DataError, SecurityError

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """The token ids of one sample.

    Attributes:
        ids: All tokens, in order.
        trained: Whether the prediction of each token counts in the loss; as long as ``ids``. The first token has no
            prediction, so its flag has no effect.
        truncated: Whether tokens were cut off to make the sample fit.
        special: A special token that a text of the record spells, and that is a special token in ``ids``. None: there is
            none.
    """

    ids: list[int]
    trained: list[bool]
    truncated: bool = False
    special: Optional[str] = None

    @property
    def num_trained(self) -> int:
        """The number of tokens that the loss counts."""
        return sum(self.trained[1:])


class Malformed(DataError):
    """A record that can't be converted to a sample. The message has the reason without the place."""


class Empty(DataError):
    """A record that has nothing to train on. The message has the reason without the place."""


def special_in(texts: Iterable[str], special: Sequence[str]) -> Optional[str]:
    """The first of the special tokens that one of the texts spells. None: there is none."""
    return next((token for text in texts for token in special if token in text), None) if special else None


def tokenized(tokenize: Callable[[], T], text: str) -> T:
    """The result of ``tokenize``, which tokenizes ``text``.

    Raises:
        Malformed: the tokenizer fails on this text.
    """
    try:
        return tokenize()
    except (ConfigError, SecurityError):
        raise
    except Exception as error:  # a tokenizer may be any user's class, and Rust's raise bare exceptions
        raise Malformed(surrogate_in(text) or f"the tokenizer fails: {type(error).__name__}: {error}") from error


class Encoder(ABC):
    """Turns records into samples."""

    @abstractmethod
    def encode(self, record: Any) -> "Parts":
        """The parts of a record's sample.

        Raises:
            Malformed: a field is missing or has the wrong contents.
            Empty: there is nothing to train on.
        """

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Everything that determines a record's ids, as plain data. Part of the cache's key."""


class Parts(ABC):
    """A record's sample before it is truncated."""

    @abstractmethod
    def whole(self) -> Sample:
        """The whole sample."""

    def cut(self, max_tokens: int) -> Sample:
        """At most ``max_tokens`` tokens. By default the last ones are cut off."""
        whole = self.whole()
        return replace(whole, ids=whole.ids[:max_tokens], trained=whole.trained[:max_tokens], truncated=True)


@dataclass(frozen=True)
class Whole(Parts):
    """A sample whose end is cut off if it is too long."""

    sample: Sample

    def whole(self) -> Sample:
        return self.sample
