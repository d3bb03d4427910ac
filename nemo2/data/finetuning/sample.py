# SPDX-License-Identifier: Apache-2.0
"""A sample: token ids, and a flag for each trained token."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo2.errors import DataError


@dataclass(frozen=True)
class Sample:
    """The token ids of one sample.

    Attributes:
        ids: All tokens, in order.
        trained: Whether the prediction of each token counts in the loss; as long as ``ids``. The first token has no
            prediction, so its flag has no effect.
        truncated: Whether tokens were cut off to make the sample fit.
    """

    ids: list[int]
    trained: list[bool]
    truncated: bool = False

    @property
    def num_trained(self) -> int:
        """The number of tokens that the loss counts."""
        return sum(self.trained[1:])


class Malformed(DataError):
    """A record that can't be converted to a sample. The message has the reason without the place."""


class Empty(DataError):
    """A record that has nothing to train on. The message has the reason without the place."""


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
        return Sample(whole.ids[:max_tokens], whole.trained[:max_tokens], truncated=True)


@dataclass(frozen=True)
class Whole(Parts):
    """A sample whose end is cut off if it is too long."""

    sample: Sample

    def whole(self) -> Sample:
        return self.sample
