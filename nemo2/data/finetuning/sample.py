# SPDX-License-Identifier: Apache-2.0
"""A sample: token ids, and a flag for each trained token."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

from nemo2.base.errors import DataError
from nemo2.data.documents import Malformed as Malformed


class Unread(NamedTuple):
    """What the sample of a good record doesn't depend on. It is an error if all records have it in common.

    Attributes:
        fields: Fields of the record with text that the sample lacks, but that a prompt template could name.
        settings: Settings with other values than their defaults that decide records of other kinds only, as ``add_bos=True``.
    """

    fields: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def in_common_with(self, other: "Unread") -> "Unread":
        """What both have."""
        return Unread(*(tuple(filter(theirs.__contains__, own)) for own, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Sample:
    """The token ids of one sample.

    Attributes:
        ids: All tokens, in order.
        trained: Whether the prediction of each token counts in the loss; as long as ``ids``. The first token has no
            prediction, so its flag has no effect.
        truncated: Whether tokens were cut off to make the sample fit.
        special: A special token that a text of the record spells. It is a special token in ``ids``, unless
            on_special_token="text". None: there is none.
        unread: See `Unread`.
        beside: Other fields with text that the sample lacks: those of a conversation, and descriptions of several words.
        lost: What the tokenizer left out of the text, or made an unknown token. None: nothing.
    """

    ids: list[int]
    trained: list[bool]
    truncated: bool = False
    special: Optional[str] = None
    unread: Unread = Unread()
    beside: tuple[str, ...] = ()
    lost: Optional[str] = None

    @property
    def num_trained(self) -> int:
        """The number of tokens that the loss counts."""
        return sum(self.trained[1:])


class Empty(DataError):
    """A record that has nothing to train on. The message has the reason without the place."""


DESCRIPTIONS = frozenset(
    ("id", "uuid", "idx", "index", "name", "type", "kind", "source", "category", "task", "topic", "domain", "dataset", "split",
     "language", "lang", "license", "url", "file", "path", "title", "author", "date", "time", "timestamp", "created",
     "created_at", "metadata", "meta", "tags", "labels", "model", "generator", "level", "difficulty", "quality", "score",
     "rating", "hash", "original_answers", "country", "state", "header", "hashed_ip", "conversation_hash",
     "conversation_id", "prompt_id", "tokenizer")
)  # fmt: skip
"""Fields that describe a record or a message rather than hold its text. Their single words are no text that a sample lacks."""


def strings_in(value: Any) -> Iterator[str]:
    """The texts in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from strings_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_in(one)


class Encoder(ABC):
    """Turns records into samples."""

    @abstractmethod
    def check(self, record: Any) -> Unread:
        """Check a record's fields, without rendering or tokenizing it. Returns `Sample.unread`.

        Raises:
            Malformed: a field is missing or has the wrong contents.
            Empty: there is nothing to train on.
        """

    @abstractmethod
    def encode(self, record: Any) -> Sample:
        """A record's whole sample.

        Raises:
            Malformed: a field is missing or has the wrong contents.
            Empty: there is nothing to train on.
        """

    def truncate(self, record: Any, sample: Sample, max_tokens: int) -> Sample:
        """At most ``max_tokens`` tokens of the ``sample`` of a ``record``. By default the last ones are cut off."""
        del record
        return replace(sample, ids=sample.ids[:max_tokens], trained=sample.trained[:max_tokens], truncated=True)

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Everything that determines a record's ids, as plain data. Part of the cache's key."""
