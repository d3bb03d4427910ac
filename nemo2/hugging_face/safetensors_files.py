# SPDX-License-Identifier: Apache-2.0
"""safetensors files: the contents of a folder, and the header of a file.

A file has eight bytes with the length of the header, the header (JSON: dtype, shape and position of each tensor), and
the tensors' bytes one after the other. Each tensor is therefore contiguous, and can be read and written without its
neighbors. Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo2.base.errors import CheckpointError
from nemo2.base.files import UnusableFile, open_regular, parse_json
from nemo2.base.names import listed
from nemo2.checkpoint.foreign_files import read_json, refuse_outside
from nemo2.checkpoint.reading import Stored
from nemo2.hugging_face.streams import grouped

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SHARD_BYTES = 5_000_000_000
"""Hugging Face's limit for a file. A larger tensor has its own file."""
_MOST_HEADER = 100_000_000
_MOST_INDEX = 256 << 20
_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME_OF = {dtype: name for name, dtype in _NAMES.items()}
_PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt", "*.bin")


def open_folder(folder: Path) -> dict[str, Stored]:
    """The position of each tensor of the released weights in ``folder``. No tensor is read.

    Raises:
        CheckpointError: there are none; or files or tensors are missing or truncated (the message lists all), or are
            pickles.
        SecurityError: a name in the index leads out of the folder.
    """
    named = _named_in_index(folder)
    files = sorted(set(named.values())) if named is not None else _without_index(folder)
    for name in files:
        refuse_outside(folder, name)
    if lost := [name for name in files if not (folder / name).exists()]:
        raise CheckpointError(
            f"{folder}: {INDEX} names {listed(lost)}, but {'this file is' if len(lost) == 1 else 'these files are'} "
            "missing. The download is incomplete. Download it again."
        )
    tensors: dict[str, Stored] = {}
    for name in files:
        for tensor, stored in read_header(folder / name).items():
            if tensor in tensors:
                raise CheckpointError(
                    f"{folder}: {tensor} is in two files, {Path(tensors[tensor].file).name} and {name}."
                )
            tensors[tensor] = stored
    if absent := sorted((named or {}).keys() - tensors.keys()):
        raise CheckpointError(
            f"{folder}: {listed(absent)} {'is' if len(absent) == 1 else 'are'} in no file, although {INDEX} says so."
        )
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file by name.

    Raises:
        CheckpointError: the file isn't a safetensors file, or its length differs from its header.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header would have {length} bytes, but the file has {size}")
            header = parse_json(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(path, 8 + length, name, entry) for name, entry in header.items()}
    except UnusableFile as error:
        raise CheckpointError(f"{path} {error}, but weights must be in regular files.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {' '.join(str(error).split())[:300]}.") from error
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].place):
        if stored.place != end:
            raise CheckpointError(
                f"{path} is not a safetensors file: {name} starts at byte {stored.place} instead of {end}."
            )
        end += stored.num_bytes
    if size != end:
        raise CheckpointError(
            f"{path} has {size} bytes, but its tensors need {end}, so the file was "
            f"{'cut off' if size < end else 'changed'}. Download or copy it again."
        )
    return tensors


def conversion_of_pickles(folder: Path) -> str:
    """The command that converts pickled weights to safetensors with transformers."""
    new = folder.with_name(f"{folder.name}-safetensors")
    program = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(new)!r}); "
        f"T.from_pretrained({str(folder)!r}).save_pretrained({str(new)!r})"
    )
    return f"python -c {shlex.quote(program)}"


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as Hugging Face's libraries do."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file to write: its header, and the position of each tensor."""

    name: str
    header: bytes
    places: Mapping[str, int]
    size: int


def plan_shards(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], *, shard_bytes: int = SHARD_BYTES
) -> tuple[list[Shard], dict[str, Any] | None]:
    """The files for these tensors, in this order, and their index. The index is None for a single file."""
    groups = list(grouped(tensors, lambda one: math.prod(one[2]) * one[1].itemsize, most=shard_bytes))
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    shards = [_shard(name, group) for name, group in zip(names, groups, strict=True)]
    if count == 1:
        return shards, None
    weight_map = {tensor: shard.name for shard in shards for tensor in shard.places}
    total = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    return shards, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _shard(name: str, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Shard:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Tensors with large elements first, as in safetensors, so that each tensor begins at a multiple of its element
    # size.
    for tensor, dtype, shape in sorted(tensors, key=lambda one: -one[1].itemsize):
        size = math.prod(shape) * dtype.itemsize
        header[tensor] = {"dtype": _NAME_OF[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = {tensor: begin + entry["data_offsets"][0] for tensor, entry in header.items() if tensor != "__metadata__"}
    return Shard(name=name, header=len(text).to_bytes(8, "little") + text, places=places, size=begin + end)


# ------------------------------------------------------------------------------------------------------ reading


def _named_in_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, from the index."""
    if not os.path.lexists(folder / INDEX):
        return None
    refuse_outside(folder, INDEX)
    index = read_json(folder / INDEX, at_most=_MOST_INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files.")
    for name in sorted(set(named.values())):
        refuse_outside(folder, name)
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} names {name}, which is not a safetensors file.")
    return named


def _without_index(folder: Path) -> list[str]:
    if os.path.lexists(folder / SINGLE):
        return [SINGLE]
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder.")
    if pickles := sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)}):
        raise CheckpointError(
            f"{folder}: the weights are pickles ({listed(pickles)}), and loading a pickle can run code. nemo2 reads "
            f"safetensors only. If you trust the files, convert them with: {conversion_of_pickles(folder)}"
        )
    raise CheckpointError(f"{folder} contains neither {SINGLE} nor {INDEX}, so it has no weights that nemo2 can read.")


def _stored(path: Path, begin: int, name: str, entry: dict[str, Any]) -> Stored:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in _NAMES:
        raise ValueError(f"{name} has dtype {entry['dtype']!r}, which nemo2 doesn't know")
    if not all(isinstance(number, int) and number >= 0 for number in (first, last, *shape)):
        raise ValueError(f"{name} has shape {entry['shape']!r} at {entry['data_offsets']!r}")
    stored = Stored(file=str(path), place=begin + first, dtype=_NAMES[entry["dtype"]], shape=shape)
    if last - first != stored.num_bytes:
        raise ValueError(f"{name} has {last - first} bytes, and its shape {list(shape)} needs {stored.num_bytes}")
    return stored
