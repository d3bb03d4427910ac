# SPDX-License-Identifier: Apache-2.0
"""Reads documents from text files, for `prepare_data` and `train_bpe`.

A file of records holds one document per record, with the text under a key: JSON lines (``.jsonl``, ``.ndjson``), a JSON
array (``.json``), or a table with a header (``.csv``, ``.tsv``), each also ``.gz``. Any other file is one document. Text
is UTF-8; a byte-order mark is dropped.
"""

import codecs
import contextlib
import csv
import glob
import gzip
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Optional, TypeVar, Union, cast

from nemo2.base.advice import advice
from nemo2.base.errors import ConfigError, DataError, Nemo2Error, SecurityError
from nemo2.base.files import MIB, parse_json
from nemo2.base.names import check_choice

Inputs = Union[str, Path, Sequence[Union[str, Path]]]
OnBadLine = Literal["fail", "skip"]
T = TypeVar("T")

_JSON_LINES = (".jsonl", ".ndjson")
_TABLES = {".csv": ",", ".tsv": "\t"}
RECORD_SUFFIXES = (*_JSON_LINES, ".json", *_TABLES)
"""Of files of records, each also with ``.gz``."""
_NO_TEXT = (
    ".parquet",
    ".arrow",
    ".feather",
    ".npy",
    ".npz",
    ".bin",
    ".idx",
    ".zip",
    ".tar",
    ".bz2",
    ".xz",
    ".zst",
    ".pdf",
)
_SHOWN = 5
_LONGEST_CELL = (1 << 31) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
Placed = tuple[str, dict[str, Any]]
"""A record's place in messages, "file:line" or "file[index]", and the record."""


class Malformed(DataError):
    """A document or record that can't be converted to tokens. The message has the reason without the place."""


@dataclass
class BadInput:
    """Input that is unreadable as text, and the policy for it.

    Attributes:
        policy: "fail": the first bad input is an error. "skip": leave it out and continue.
        limit: With "skip", the largest number of bad inputs. More are an error, because the format is then probably
            wrong.
        count: The number of inputs left out.
        examples: The places and reasons of the first few.

    Raises:
        ConfigError: an unknown policy.
    """

    policy: OnBadLine = "fail"
    limit: int = 1000
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("on_bad_line", self.policy, OnBadLine)

    @property
    def how_to_skip(self) -> str:
        """How the reader chooses the policy "skip", as the end of a sentence."""
        return " with " + advice("--skip-bad-lines", "on_bad_line='skip'")

    def report(self, where: str, why: str) -> None:
        """Record a bad input.

        Raises:
            DataError: the policy is "fail", or there are more bad inputs than the limit.
        """
        if self.policy == "fail":
            raise DataError(f"{where}: {why}. Correct it, or skip such lines{self.how_to_skip}.")
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
    files: dict[Path, None] = {}
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
        files.update(dict.fromkeys(sorted(below)))
    return list(files)


def read_documents(files: Iterable[Path], *, text_key: str = "text", bad: BadInput) -> Iterator[tuple[str, str]]:
    """The documents of `files` in order with their places, including empty documents. Input that isn't text is reported
    to `bad`.

    Raises:
        DataError: a file is unreadable, or `bad` has reached its limit.
    """
    for file in files:
        try:
            if holds_records(file):
                yield from _texts_of_records(file, text_key, bad)
            else:
                text = _text(file, bad)
                if text is not None:
                    yield str(file), text
        except (OSError, EOFError) as error:
            raise DataError(f"{file} can't be read: {error}.") from error


def read_records(file: Path, bad: BadInput, *, at_most: Optional[int] = None) -> Iterator[Placed]:
    """The records of a file of JSON lines, of a JSON array or of a table, with their places. What isn't an object with
    named fields is reported to `bad`.

    Args:
        at_most: The largest number of bytes in a line of JSON. None: no limit.

    Raises:
        OSError: the file can't be read.
        DataError: see `BadInput.report`.
    """
    suffix = suffix_of(file)
    if suffix in _TABLES:
        yield from _rows_of_table(file, bad, _TABLES[suffix])
        return
    array = _array(file) if suffix == ".json" or _first_character(file) == b"[" else None
    if array is None:
        yield from _lines(file, bad, at_most)
        return
    for index, record in enumerate(array):
        yield from _checked(f"{file}[{index}]", record, bad)


def first_record(file: Path) -> Any:
    """The first record of a file. None: it can't be read, or has none."""
    if file.is_file() and holds_records(file):
        with contextlib.suppress(OSError, EOFError, Nemo2Error):
            return next((record for _, record in read_records(file, BadInput("skip"))), None)
    return None


def surrogate_in(text: str) -> Optional[str]:
    """Where a text has half of a character, which no encoding of Unicode can hold. None: nowhere."""
    match = _SURROGATE.search(text)
    if match is None:
        return None
    return f"character {match.start() + 1} is {match[0].encode('unicode_escape').decode()}, half of a surrogate pair"


def unknown_in(ids: Sequence[int], tokenizer: Any) -> Optional[str]:
    """What tells that a text had characters without a token: the tokenizer's unknown token. None: there is none in ``ids``."""
    unknown = getattr(tokenizer, "unk_id", None)
    others = (getattr(tokenizer, name, None) for name in ("bos_id", "eos_id", "pad_id"))
    if unknown is None or unknown in others or unknown not in ids:
        return None
    return f"{ids.count(unknown)} of {len(ids)} tokens are the unknown token"


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


def _array(file: Path) -> Optional[list[Any]]:
    """The values of a JSON array, or the only value of a file. None: the file is not one JSON text."""
    try:
        value = parse_json(_read(file).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else [value]


def _lines(file: Path, bad: BadInput, at_most: Optional[int]) -> Iterator[Placed]:
    with _open(file) as lines:
        for number, raw in enumerate(lines, start=1):
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
                yield from _checked(where, record, bad)


def _checked(where: str, record: Any, bad: BadInput) -> Iterator[Placed]:
    if isinstance(record, dict):
        yield where, record
    else:
        bad.report(where, f"a JSON {type(record).__name__}, not an object with named fields")


def _rows_of_table(file: Path, bad: BadInput, delimiter: str) -> Iterator[Placed]:
    text = _decoded(file, bad)
    if text is None:
        return
    csv.field_size_limit(_LONGEST_CELL)
    # Not splitlines, for which a form feed and U+2028 end a line.
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: Optional[list[str]] = None
    while True:
        start = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            bad.report(f"{file}:{start}", f"not CSV ({error})")
            continue
        if row is None:
            return
        if not row:
            continue
        if header is None:
            header = [name.strip() for name in row]
            if twice := next((name for name in header if header.count(name) > 1), None):
                bad.report(f"{file}:{start}", f"two columns are named {twice!r}")
                return
        elif len(row) != len(header):
            bad.report(f"{file}:{start}", f"{len(row)} cells in a table of {len(header)} columns")
        else:
            yield f"{file}:{start}", dict(zip(header, row, strict=True))


def _texts_of_records(file: Path, text_key: str, bad: BadInput) -> Iterator[tuple[str, str]]:
    for where, record in read_records(file, bad):
        text = record.get(text_key)
        if not isinstance(text, str):
            keys = ", ".join(sorted(record)[:8])
            name = advice("--text-key", "text_key")
            bad.report(
                where, f"no text under the key {text_key!r}; its keys are: {keys or 'none'}. Name one with {name}"
            )
        elif (reason := surrogate_in(text)) is not None:
            bad.report(where, reason)
        else:
            yield where, text


def _text(file: Path, bad: BadInput) -> Optional[str]:
    if suffix_of(file) in _NO_TEXT:
        bad.report(str(file), f"a {suffix_of(file)} file, which is not text. Convert it to .jsonl or .txt")
        return None
    return _decoded(file, bad)


def _decoded(file: Path, bad: BadInput) -> Optional[str]:
    raw = _read(file)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        bad.report(f"{file}:{line}", f"not UTF-8 ({error.reason} at byte {error.start})")
        return None


def _read(file: Path) -> bytes:
    with _open(file) as contents:
        return contents.read()


def _open(file: Path) -> BinaryIO:
    return cast(BinaryIO, (gzip.open if file.suffix.lower() == ".gz" else open)(file, "rb"))


def _first_character(file: Path) -> bytes:
    with _open(file) as lines:
        for raw in lines:
            if text := raw.removeprefix(codecs.BOM_UTF8).strip():
                return text[:1]
    return b""


def holds_records(file: Path) -> bool:
    """Whether the file's name ends in a suffix of files of records."""
    return suffix_of(file) in RECORD_SUFFIXES


def suffix_of(file: Path) -> str:
    """The suffix in lower case, without ``.gz``."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
