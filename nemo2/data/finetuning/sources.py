# SPDX-License-Identifier: Apache-2.0
"""Sources of records: files of JSON lines, and objects that hold records."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo2.data.documents import BadInput, read_records
from nemo2.errors import DataError
from nemo2.files import MIB

Placed = tuple[str, Any]
"""A record behind the place that it is called by in messages."""


class Source(ABC):
    """The records of one split."""

    name: str

    @abstractmethod
    def records(self, bad: BadInput) -> Iterator[Placed]:
        """The records in order; what can't be read as one is reported to `bad`.

        Raises:
            DataError: the source can't be read, or `bad` says that it has had enough.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the contents: two sources with one fingerprint hold the same records."""


_MOST_OF_A_LINE = 64 * MIB
"""More than any sequence of tokens spells, and little enough to be tokenized in passing."""


class JsonLines(Source):
    """The objects of one or more ``.jsonl`` files, one per line.

    Raises:
        DataError: a file isn't there.
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
                with open(path, "rb") as file:
                    hashed.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise DataError(f"{path} can't be read: {error}.") from error
        return hashed.hexdigest()


class Records(Source):
    """Records in memory, or in a ``datasets`` object, in its order.

    Args:
        records: Anything that can be iterated over again and again.
        name: What messages call it; a record is ``name[index]``.
    """

    def __init__(self, records: Iterable[Any], name: str) -> None:
        self.held, self.name = records, name

    def records(self, bad: BadInput) -> Iterator[Placed]:
        for index, record in enumerate(self.held):
            yield f"{self.name}[{index}]", record

    @cached_property
    def fingerprint(self) -> str:
        # The package's own follows from the files and from all that was done to them; without one the records are hashed.
        own = getattr(self.held, "_fingerprint", None)
        if isinstance(own, str):
            return own
        hashed = hashlib.sha256()
        for record in self.held:
            hashed.update(json.dumps(record, sort_keys=True, default=repr).encode("utf-8", "surrogatepass") + b"\n")
        return hashed.hexdigest()
