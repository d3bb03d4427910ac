# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: the sources of Python's standard library, for the demo and the tests."""

import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from filelock import FileLock, Timeout

from nemo2.base.errors import DataError

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_VALIDATION_EVERY = 20
_LOCK_SECONDS = 600
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DemoData:
    """A tokenizer and the token files made with it. The prefixes are for `PreTrainingDataModule`."""

    tokenizer: str
    """The path of a ``tokenizer.json``."""
    train: str
    """The prefix of the training files."""
    validation: str
    """The prefix of the validation files."""


def python_stdlib_corpus(max_bytes: Optional[int] = None) -> list[Path]:
    """The .py files of the running interpreter's standard library, sorted by their path within it.

    Installed packages and the library's tests are left out.

    Args:
        max_bytes: Thin the list evenly to at most this many bytes, so that all parts of the library remain. None: all
            files.

    Raises:
        DataError: this interpreter has no library sources (a frozen or zipped interpreter).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for place, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        files.extend(Path(place, name) for name in names if name.endswith(".py"))
    sized = [(f, f.stat().st_size) for f in sorted(files, key=lambda f: f.relative_to(root).as_posix())]
    if not sized:
        raise DataError(f"{root} contains no Python sources. Use an interpreter that was installed with its library.")
    total = sum(size for _, size in sized)
    if max_bytes is None or total <= max_bytes:
        return [file for file, _ in sized]
    kept, taken, passed = [], 0, 0
    for file, size in sized:
        passed += size
        # Keep a file if the kept text stays within this file's share of the total so far.
        if taken + size <= max_bytes * passed / total:
            kept.append(file)
            taken += size
    return kept


def prepare_demo_data(
    directory: Union[str, Path], vocab_size: int = 4096, *, max_bytes: int = 12_000_000, progress: bool = False
) -> DemoData:
    """Train a BPE tokenizer on the standard library and tokenize the library into training and validation files.

    Every 20th file is for validation. The files are stored in `directory` under a name made of the interpreter, the
    sources and the settings, so a second call reuses them. Concurrent callers wait for the process that creates them.
    An interrupted call leaves no files that a later call would take for complete.

    Args:
        directory: The folder for the files.
        vocab_size: The number of the tokenizer's ids.
        max_bytes: The most bytes of the library's text to use.
        progress: Show a bar on the terminal.
    """
    files = python_stdlib_corpus(max_bytes=max_bytes)
    place = Path(directory).expanduser() / _key(files, vocab_size)
    data = DemoData(
        tokenizer=str(place / "tokenizer.json"), train=str(place / "train"), validation=str(place / "validation")
    )
    last_file = Path(f"{data.validation}.idx")
    if last_file.is_file():
        return data
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{place} cannot be created: {error}. Choose a writable directory.") from error
    try:
        with FileLock(place / ".lock", timeout=_LOCK_SECONDS):
            if not last_file.is_file():  # another process may have finished meanwhile
                _prepare(files, vocab_size, data, progress)
    except Timeout as error:
        raise DataError(
            f"Another process has been preparing {place} for {_LOCK_SECONDS} s. If no such process exists, remove its "
            ".lock file."
        ) from error
    return data


def _prepare(files: list[Path], vocab_size: int, data: DemoData, progress: bool) -> None:
    from nemo2.data.bpe import train_bpe
    from nemo2.data.documents import BadInput, read_documents
    from nemo2.data.prepare import prepare_data

    # A few of the library's files, mostly tests of decoding, aren't UTF-8.
    texts = (text for _, text in read_documents(files, bad=BadInput("skip")))
    tokenizer = train_bpe(texts, vocab_size, data.tokenizer)
    validation = files[::_VALIDATION_EVERY]
    training = [file for number, file in enumerate(files) if number % _VALIDATION_EVERY]
    for prefix, part in ((data.train, training), (data.validation, validation)):
        # A run that was killed may have left one of the two.
        prepare_data(part, prefix, tokenizer, on_bad_line="skip", progress=progress, overwrite=True)


def _key(files: list[Path], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{_VERSION} {vocab_size}\n".encode())
    for file in files:
        digest.update(f"{file} {file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return f"python-{version}-{vocab_size}-{digest.hexdigest()[:12]}"
