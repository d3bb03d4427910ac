# SPDX-License-Identifier: Apache-2.0
"""Sources of records: files, and objects that hold records."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError, DataError
from nemo2.base.files import MIB, sha256
from nemo2.data.documents import BadInput, read_records

Placed = tuple[str, Any]
"""A record's name in messages, and the record."""


class Source(ABC):
    """The records of one split."""

    name: str

    @abstractmethod
    def records(self, bad: BadInput) -> Iterator[Placed]:
        """The records in order. Unreadable records are reported to `bad`.

        Raises:
            DataError: the source can't be read, or see `BadInput.report`.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the contents. Two sources with the same fingerprint hold the same records."""


_MOST_OF_A_LINE = 64 * MIB
"""The largest line in bytes: longer than the text of any sequence of tokens, and short enough to tokenize quickly."""


class RecordFiles(Source):
    """The records of one or more files: JSON lines, JSON arrays, or tables (`nemo2.data.documents`).

    Raises:
        DataError: a file is missing.
    """

    def __init__(self, *files: Path) -> None:
        for file in files:
            if not file.is_file():
                raise DataError(f"{file} does not exist or is not a file.")
        self.files = files
        self.name = ", ".join(map(str, files))

    def records(self, bad: BadInput) -> Iterator[Placed]:
        for file in self.files:
            try:
                yield from read_records(file, bad, at_most=_MOST_OF_A_LINE)
            except (OSError, EOFError) as error:
                raise DataError(f"{file} can't be read: {error}.") from error

    @cached_property
    def fingerprint(self) -> str:
        hashed = hashlib.sha256()
        for path in self.files:
            try:
                hashed.update(bytes.fromhex(sha256(path)))
            except OSError as error:
                raise DataError(f"{path} can't be read: {error}.") from error
        return hashed.hexdigest()


class Records(Source):
    """Records in memory, or in a ``datasets`` object, in its order.

    Args:
        records: Any object that can be iterated over repeatedly.
        name: The name in messages, as in ``name[index]``.
    """

    def __init__(self, records: Iterable[Any], name: str) -> None:
        self.held, self.name = records, name

    def records(self, bad: BadInput) -> Iterator[Placed]:
        for index, record in enumerate(self.held):
            yield f"{self.name}[{index}]", record

    @cached_property
    def fingerprint(self) -> str:
        # The fingerprint of ``datasets`` depends on the files and on every operation on them. Without one, the records
        # are hashed.
        own = getattr(self.held, "_fingerprint", None)
        if isinstance(own, str):
            return own
        hashed = hashlib.sha256()
        for record in self.held:
            hashed.update(json.dumps(record, sort_keys=True, default=_plain).encode("utf-8", "surrogatepass") + b"\n")
        return hashed.hexdigest()


def _plain(value: Any) -> Any:
    # Not repr of an array or tensor, which leaves out the middle of a long one.
    return value.tolist() if hasattr(value, "tolist") else repr(value)


_PART = re.compile(r"([\w.-]+)(?:\[(\d+%?)?:(\d+%?)?\])?")


@dataclass(frozen=True)
class Part:
    """A split or consecutive records of it: ``train``, ``train[:100]``, ``train[5%:10%]``.

    Attributes:
        name: The split's name.
        start, stop: The positions of the first record and of the one after the last. None: the split's.
    """

    name: str
    start: Optional[str] = None
    stop: Optional[str] = None

    @classmethod
    def parse(cls, text: str) -> "Part":
        """The part that a text names.

        Raises:
            ConfigError: the text has another form.
        """
        if not (match := _PART.fullmatch(text)):
            raise ConfigError(
                f"data.split={text!r}: write a split's name, such as 'train', 'train[:100]' or 'train[5%:10%]'."
            )
        return cls(*match.groups())

    def of(self, source: Source) -> Source:
        """These records of the split in ``source``."""
        if self.start is None and self.stop is None:
            return source
        held = source.held if isinstance(source, Records) else None
        size = len(held) if hasattr(held, "__len__") else None  # pyright: ignore[reportArgumentType]
        start, stop = (self._position(text, size) for text in (self.start or "0", self.stop))
        name = f"{source.name}[{start}:{'' if stop is None else stop}]"
        if held is not None and hasattr(held, "select") and size is not None:
            return Records(held.select(range(start or 0, min(size, size if stop is None else stop))), name)  # pyright: ignore
        return Slice(source, start or 0, stop, name)

    def _position(self, text: Optional[str], size: Optional[int]) -> Optional[int]:
        if text is None or not text.endswith("%"):
            return None if text is None else int(text)
        if size is None:
            raise ConfigError(
                f"data.split: {text} of {self.name!r}, whose number of records is unknown. Write numbers."
            )
        return round(size * int(text[:-1]) / 100)


class Slice(Source):
    """Consecutive records of a source."""

    def __init__(self, source: Source, start: int, stop: Optional[int], name: str) -> None:
        self.source, self.start, self.stop, self.name = source, start, stop, name

    def records(self, bad: BadInput) -> Iterator[Placed]:
        return islice(self.source.records(bad), self.start, self.stop)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint} {self.start} {self.stop}".encode()).hexdigest()
