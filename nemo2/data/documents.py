# SPDX-License-Identifier: Apache-2.0
"""Reads documents from text files, for `prepare_data` and `train_bpe`.

A ``.jsonl`` file (or ``.ndjson``, either also ``.gz``) holds one JSON object per line with the text under a key; any
other file is one document. Text is UTF-8; a byte-order mark is dropped.
"""

import glob
import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Optional, Union, cast

from nemo2.errors import DataError
from nemo2.files import MIB, parse_json

Inputs = Union[str, Path, Sequence[Union[str, Path]]]
OnBadLine = Literal["fail", "skip"]

_JSON_LINES = (".jsonl", ".ndjson")
_SHOWN = 5


@dataclass
class BadInput:
    """Input that is unreadable as text, and the policy for it.

    Attributes:
        policy: "fail": the first bad input is an error. "skip": leave it out and continue.
        limit: With "skip", the largest number of bad inputs. More are an error, because the format is then probably
            wrong.
        count: The number of inputs left out.
        examples: The places and reasons of the first few.
    """

    policy: OnBadLine = "fail"
    limit: int = 1000
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def report(self, where: str, why: str) -> None:
        """Record a bad input.

        Raises:
            DataError: the policy is "fail", or there are more bad inputs than the limit.
        """
        if self.policy == "fail":
            raise DataError(f"{where}: {why}. Correct the document, or skip such documents with on_bad_line='skip'.")
        self.count += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{where}: {why}")
        if self.count > self.limit:
            raise DataError(
                f"More than max_bad_lines={self.limit} documents cannot be read. The first are: "
                f"{'; '.join(self.examples)}. Check that these are the right files, or raise max_bad_lines."
            )


def find_files(inputs: Inputs) -> list[Path]:
    """The files that `inputs` name, in an order that does not depend on the file system.

    An input is a file, a directory (all files below it except hidden ones, sorted by path) or a glob pattern (sorted;
    ``**`` enters directories). A file that is named twice is read once.

    Raises:
        DataError: an input matches nothing.
    """
    named = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    if not named:
        raise DataError("No input was given. Name text files, .jsonl files, directories or glob patterns.")
    found: dict[Path, None] = {}
    for one in named:
        path = Path(one).expanduser()
        if path.is_dir():
            below = [p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))]
        elif path.is_file():
            below = [path]
        else:
            below = [Path(p) for p in glob.glob(os.path.expanduser(str(one)), recursive=True) if os.path.isfile(p)]
        if not below:
            raise DataError(f"{one}: this is no file, no directory with files, and no pattern that matches a file.")
        found.update(dict.fromkeys(sorted(below)))
    return list(found)


def read_documents(files: Iterable[Path], *, text_key: str = "text", bad: BadInput) -> Iterator[str]:
    """The documents of `files` in order, including empty documents. Input that isn't text is reported to `bad`.

    Raises:
        DataError: a file is unreadable, or `bad` has reached its limit.
    """
    for file in files:
        try:
            if is_json_lines(file):
                yield from _json_lines(file, text_key, bad)
            else:
                text = _text(file, bad)
                if text is not None:
                    yield text
        except (OSError, EOFError) as error:
            raise DataError(f"{file} can't be read: {error}.") from error


def read_records(file: Path, bad: BadInput, *, at_most: Optional[int] = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a ``.jsonl`` file with their places, "file:line". A line that isn't an object is reported to
    `bad`.

    Args:
        at_most: The largest number of bytes in a line. None: no limit.

    Raises:
        OSError: the file can't be read.
        DataError: see `BadInput.report`.
    """
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rb") as lines:
        for number, raw in enumerate(cast(BinaryIO, lines), start=1):
            if not raw.strip():
                continue
            where = f"{file}:{number}"
            if at_most is not None and len(raw) > at_most:
                bad.report(
                    where, (f"a line of {len(raw) / MIB:,.0f} MiB, but a sample can have at most {at_most // MIB}")
                )
                continue
            try:
                record = parse_json(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                bad.report(where, f"not UTF-8 ({error.reason} at byte {error.start})")
            except ValueError as error:
                bad.report(where, f"not JSON ({error})")
            except RecursionError:
                bad.report(where, "JSON that is nested too deeply to be read")
            else:
                if isinstance(record, dict):
                    yield where, record
                else:
                    bad.report(where, f"a JSON {type(record).__name__}, not an object with named fields")


def _json_lines(file: Path, text_key: str, bad: BadInput) -> Iterator[str]:
    for where, record in read_records(file, bad):
        text = record.get(text_key)
        if isinstance(text, str):
            yield text
        else:
            keys = ", ".join(sorted(record)[:8])
            bad.report(where, f"no text under the key {text_key!r}; its keys are: {keys or 'none'}")


def _text(file: Path, bad: BadInput) -> str | None:
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        bad.report(f"{file}:{line}", f"not UTF-8 ({error.reason} at byte {error.start})")
        return None


def is_json_lines(file: Path) -> bool:
    """Whether the file's name ends in a suffix of JSON lines."""
    name = file.name.removesuffix(".gz")
    return name.endswith(_JSON_LINES)


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
