# SPDX-License-Identifier: Apache-2.0
"""Checks of Megatron's token files before anything is built on them.

Megatron-Core reads ``PREFIX.idx`` without checks. A wrong pointer or length fails only when training reaches that
document, possibly after days. Under tensor parallelism, a token id outside the vocabulary never fails. This module
checks the files completely, with vectorised code, when the data module is set up.

The format (``megatron.core.datasets.indexed_dataset``): 9 bytes magic, version u64, dtype code u8, number of sequences
u64, number of document ends u64; then sequence lengths i32, byte offsets into the .bin file i64, document ends i64.
"""

import hashlib
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Union

import numpy as np

from nemo2.base.errors import DataError
from nemo2.base.names import nearest
from nemo2.data.inputs import Input
from nemo2.data.token_files import read_sidecar, strip_suffix

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_ROWS_AT_ONCE = 1 << 22
_SCANNED_BYTES = 256 << 20
_SCANNED_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class TokenFile:
    """A checked pair of files.

    Attributes: prefix: The common path of the files, without suffix. dtype: The dtype of the token ids in the .bin
        file. lengths: The number of tokens in each sequence, int32, mapped from the file. Megatron splits and shuffles
        by sequence. fingerprint: A hash of everything in the files that an index depends on. All ranks of all nodes
        compute the same value. inputs: The .bin and the .idx file, as they were when they were opened.
    """

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray
    fingerprint: str
    inputs: tuple[Input, Input]

    def described_inputs(self) -> tuple[Input, ...]:
        """`inputs` with the hashes in ``PREFIX.json``, unless a file was written after this description."""
        try:
            described = Input.of(f"{self.prefix}.json").modified or 0
        except OSError:
            return self.inputs
        sidecar = read_sidecar(self.prefix)
        if sidecar is None or not isinstance(sidecar.sha256, dict):
            return self.inputs
        return tuple(
            replace(item, sha256=sidecar.sha256.get(suffix)) if (item.modified or 0) <= described else item
            for item, suffix in zip(self.inputs, ("bin", "idx"), strict=True)
        )

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def tokens_between(self, first: float, last: float) -> int:
        """The number of tokens in the sequences between the fractions `first` and `last` of all, rounded as in
        Megatron's builder."""
        count = float(len(self.lengths))
        return int(self.lengths[int(round(first * count)) : int(round(last * count))].sum(dtype=np.int64))


def open_token_file(path: Union[str, Path]) -> TokenFile:
    """Check ``path.idx`` for consistency, also with ``path.bin``. `path` may end in either suffix.

    Raises:
        DataError: a file is missing, unreadable or corrupt. The message names the file, the position and the fix.
    """
    prefix = os.path.expanduser(strip_suffix(path))
    _refuse_missing(prefix)
    try:
        inputs = Input.of(f"{prefix}.bin"), Input.of(f"{prefix}.idx")
        bin_size, size = (item.size or 0 for item in inputs)
        with open(f"{prefix}.idx", "rb") as file:
            header = file.read(_HEADER.size)
        with open(f"{prefix}.bin", "rb"):
            pass
        code, sequences, documents = _header(prefix, header, size)
        dtype = np.dtype(_TOKEN_DTYPES[code])
        table = np.memmap(f"{prefix}.idx", mode="r", dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{prefix}.bin/.idx can't be read: {error}.") from error
    begin = _HEADER.size
    lengths = np.frombuffer(table, np.int32, sequences, begin)
    offsets = np.frombuffer(table, np.int64, sequences, begin + lengths.nbytes)
    ends = np.frombuffer(table, np.int64, documents, begin + lengths.nbytes + offsets.nbytes)
    _check_sequences(prefix, lengths, offsets, dtype, bin_size)
    if documents < 2 or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise _corrupt(prefix, f"its document ends do not lead from 0 to the {sequences} sequences")
    # Megatron's sample index depends on the lengths only, so it stays valid if tokens change and lengths don't.
    fingerprint = f"{hashlib.sha256(lengths.data).hexdigest()}-{dtype.name}-{bin_size}"
    return TokenFile(prefix, dtype, lengths, fingerprint, inputs)


def check_token_ids(file: TokenFile, vocab_size: int) -> None:
    """Check that every id is below `vocab_size`.

    The highest id is read from ``PREFIX.json`` if `prepare_data` wrote one. Otherwise up to 256 MiB of the .bin file
    are scanned, in evenly spread parts. Under tensor parallelism, training would continue with an id beyond the
    vocabulary, at a lower loss.

    Raises:
        DataError: an id is negative or too high.
    """
    if file.dtype.kind == "u" and np.iinfo(file.dtype).max < vocab_size:
        return
    sidecar = read_sidecar(file.prefix)
    low, high = (0, sidecar.max_token_id) if sidecar is not None else _extremes(file)
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{file.prefix}.bin contains token id {low if low < 0 else high}, but the tokenizer has {vocab_size} ids "
            f"(0 to {vocab_size - 1}). Use the tokenizer that the data was created with, or create the data again: "
            "nemo2 data prepare."
        )


def _header(prefix: str, header: bytes, size: int) -> tuple[int, int, int]:
    if len(header) < _HEADER.size or header[: len(_MAGIC)] != _MAGIC:
        raise _corrupt(prefix, "it does not start like an index" if header else "it is empty")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1:
        raise _corrupt(prefix, f"it has format version {version}, but nemo2 knows only version 1")
    if code not in _TOKEN_DTYPES:
        raise _corrupt(prefix, f"its data type has code {code}, but token ids have one of {sorted(_TOKEN_DTYPES)}")
    table = sequences * 12 + documents * 8
    # multimodal data has one more byte per sequence
    if size not in (_HEADER.size + table, _HEADER.size + table + sequences):
        raise _corrupt(
            prefix,
            f"it announces {sequences} sequences and {documents} document ends, which does not fit its {size} bytes",
        )
    if sequences == 0:
        raise DataError(f"{prefix}.idx lists no documents, so there is nothing to train on. Prepare the data again.")
    return code, sequences, documents


def _check_sequences(prefix: str, lengths: np.ndarray, offsets: np.ndarray, dtype: np.dtype, bin_size: int) -> None:
    for begin in range(0, len(lengths), _ROWS_AT_ONCE):
        length = lengths[begin : begin + _ROWS_AT_ONCE].astype(np.int64)
        offset = offsets[begin : begin + _ROWS_AT_ONCE]
        # Not offset + length * itemsize, which may overflow with a corrupt offset.
        wrong = (length < 0) | (offset < 0) | (offset > bin_size) | (length > (bin_size - offset) // dtype.itemsize)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise _corrupt(
                prefix,
                f"sequence {begin + row} is said to have {length[row]} tokens from byte {offset[row]} of a .bin file "
                f"of {bin_size} bytes",
            )


def _extremes(file: TokenFile) -> tuple[int, int]:
    """The lowest and highest id in the .bin file, or in evenly spread parts of a large file."""
    count = os.path.getsize(f"{file.prefix}.bin") // file.dtype.itemsize
    if count == 0:
        return 0, 0
    tokens = np.memmap(f"{file.prefix}.bin", mode="r", dtype=file.dtype, shape=(count,))
    step = _SCANNED_AT_ONCE // file.dtype.itemsize
    starts = np.arange(0, count, step)
    at_most = _SCANNED_BYTES // _SCANNED_AT_ONCE
    if len(starts) > at_most:
        starts = starts[np.linspace(0, len(starts) - 1, at_most).astype(int)]
    parts = [tokens[start : start + step] for start in starts]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def _refuse_missing(prefix: str) -> None:
    missing = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not os.path.isfile(f"{prefix}{suffix}")]
    if not missing:
        return
    folder = Path(prefix).parent
    if len(missing) == 1:
        raise DataError(
            f"{missing[0]} is missing, but the other file of the dataset exists. A dataset needs its .bin and its .idx "
            "file. Copy the missing file, or prepare the data again."
        )
    there = sorted({strip_suffix(p.name) for p in folder.glob("*.idx")}) if folder.is_dir() else []
    shown = nearest(Path(prefix).name, there) or there[:8]
    if not folder.is_dir():
        where = f"The folder {folder} does not exist."
    elif shown:
        where = f"In that folder there are {', '.join(shown)}."
    else:
        where = "There are no datasets in that folder."
    raise DataError(
        f"No dataset at {prefix}: neither {missing[0]} nor the .idx file exists. {where} Paths of token files have "
        "no suffix. Make token files from text with nemo2 data prepare."
    )


def _corrupt(prefix: str, why: str) -> DataError:
    return DataError(f"{prefix}.idx is corrupt: {why}. Copy both files again from their source, or prepare them again.")
