# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron-Core's checkpoint files as data, also from untrusted sources.

The format has pickles in three places, and their readers would run them. torch opens ``.metadata`` with `pickle.load`,
and objects inside the shards with ``torch.load(weights_only=False)``. It reads ``common.pt`` with its safe default,
which an environment variable turns off. Inside `data_only` all three may only name the contents of a checkpoint.

Files must be in the checkpoint's folder. A link or a path in ``.metadata`` that leads out of it is rejected.
"""

import functools
import importlib
import io
import os
import pathlib
import pickle
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.base.files import open_regular, why_not_inside
from nemo2.checkpoint.foreign_files import read_json
from nemo2.mcore.parallel.norm_names import renamed_norms

COMMON = "common.pt"
"""Megatron-Core's file for state that isn't sharded over ranks."""
COMMON_OBJECT = "common_state/shard_0_1"
"""The name of that state among the tensors, from 0.19 on."""
_EXTRA_STATE = "_extra_state"
_TENSOR_PARTS = {
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
}
_DELAYED_SCALING = ("megatron.core.extensions.transformer_engine", "TEDelayedScaling")
"""The recipe of delayed scaling that Megatron-Core makes."""
_STORAGE_READERS = {
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # Megatron-Core puts it in torch's place, from 0.18 on
}
"""The functions that a pickled tensor names to read its storage."""
_METADATA = ".metadata"
_CONFIG = "metadata.json"
_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_DATA = [io.BytesIO, pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath]
"""Classes that torch's safe loading accepts besides its own. Transformer Engine keeps its FP8 state in a BytesIO."""
_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": {"OrderedDict"},
    "_codecs": {"encode"},
}  # fmt: skip
"""Names in the ``.metadata`` of torch 2.6 to 2.15 and Megatron-Core 0.15 to 0.19."""


class _AnyTensorProperties:
    """torch's `TensorProperties`, also from a newer torch. Their state is a tuple, which grows at its end (strides, of the
    writer's tensor, in torch 2.15); torch 2.13 fails on the longer one and needs nothing of the rest."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        object.__setattr__(self, "__class__", TensorProperties)
        self.__setstate__(state[: len(fields(TensorProperties))])


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _AnyTensorProperties
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch":
            # getattr with a plain name, no dotted path, so that only a dtype can result.
            value = torch.__dict__.get(name)
            if isinstance(value, torch.dtype):
                return value
        raise SecurityError(
            f"{_METADATA} names {module}.{name}, which checkpoints do not contain. Loading it could run code, so "
            "nemo2 ran none of it. Another program wrote the file, or somebody tampered with it. Load another "
            "checkpoint."
        )


def read_metadata(weights: Path) -> Any:
    """The ``.metadata`` of a ``torch_dist`` folder as torch's ``Metadata``: names, shapes and dtypes of the tensors,
    without contents.

    Raises:
        CheckpointError: the file is missing, or has another format.
        SecurityError: the file names something that isn't part of a checkpoint.
    """
    path = weights / _METADATA
    try:
        with open_regular(path, follow=False) as file:
            return _load_metadata(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or f'it {error}'}.") from error
    except SecurityError as error:
        raise SecurityError(f"{weights}: {error}") from None
    except Exception as error:  # unpickling garbage raises anything
        raise CheckpointError(
            f"{path} is damaged, or was written by a newer torch than the installed {torch.__version__}, and cannot be "
            f"unpickled ({type(error).__name__}). Load another checkpoint, or upgrade torch."
        ) from error


def weights_problem(weights: Path) -> Optional[str]:
    """The reason why the ``torch_dist`` files of a checkpoint without a manifest can't be read, judging by their names
    and sizes. None: no reason was found."""
    try:
        backend = read_json(weights / _CONFIG)["sharded_backend"]
    except CheckpointError as error:
        return str(error).removesuffix(".")
    except (KeyError, TypeError):
        return f"{_CONFIG} names no sharded_backend"
    if backend != "torch_dist":
        return f"{_CONFIG} names the format {backend!r}, but nemo2 reads 'torch_dist' only"
    if not (weights / COMMON).is_file() and COMMON_OBJECT not in read_metadata(weights).state_dict_metadata:
        return f"{COMMON} is missing"
    return None


def refuse_code_in_extra_states(loaded: Any) -> None:
    """Check the loaded data for Transformer Engine's FP8 states: pickles within tensors, which it unpickles when the
    model takes them.

    Raises:
        CheckpointError: a newer Megatron-Core wrote a state in a form that the installed one cannot read.
        SecurityError: a state is more than tensors, numbers and Transformer Engine's recipes. The message has the state
            and the names in it.
    """
    pending = [("", loaded)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending.extend((f"{path}.{key}".removeprefix("."), item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            pending.extend((path, item) for item in value)
        elif path.endswith(_EXTRA_STATE):
            content = _bytes_of(value)
            if content and content[:2] != b"PK":  # an archive of torch.save is read with torch's safe default
                try:
                    _ExtraStateUnpickler(io.BytesIO(content)).load()
                except (SecurityError, CheckpointError) as error:
                    raise type(error)(f"{path} {error}") from None
                except Exception as error:  # unpickling garbage raises anything
                    raise SecurityError(
                        f"{path} cannot be read as plain data ({type(error).__name__}), so nemo2 does not load it."
                    ) from error


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        return value.detach().cpu().numpy().tobytes()
    return value.getvalue() if isinstance(value, io.BytesIO) else b""


class _ExtraStateUnpickler(pickle.Unpickler):
    """Reads a pickle in the way of Transformer Engine's unpickler, with placeholders for its classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "transformer_engine.common.recipe" and name.isidentifier() and name.lstrip("_")[:1].isupper():
            return _Placeholder
        if (module, name) == _DELAYED_SCALING:
            return _Placeholder
        if (module, name) == ("builtins", "getattr"):  # of an enumeration, in Python 3.11
            return _attribute_of_placeholder
        if (module, name) in _STORAGE_READERS:
            if not hasattr(importlib.import_module(module), name):
                raise CheckpointError(
                    f"was written under a newer Megatron-Core: it names {module}.{name}, which the installed one "
                    "lacks. Install Megatron-Core 0.18 or newer."
                )
            return _load_storage
        if (module, name) in _TENSOR_PARTS:
            return super().find_class(module, name)
        if module == "torch" and (
            isinstance(torch.__dict__.get(name), torch.dtype)
            or name in ("Size", "device", "FloatStorage", "ByteStorage")
        ):
            return torch.__dict__[name]
        raise SecurityError(
            f"names {module}.{name}, which Transformer Engine's states do not contain. Loading it could run code."
        )


class _Placeholder:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _attribute_of_placeholder(owner: Any, name: Any) -> Any:
    if owner is not _Placeholder or not str(name).isidentifier():
        raise SecurityError(
            "takes an attribute of an object that is not Transformer Engine's. Loading it could run code."
        )
    return _Placeholder()


def _load_storage(content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        raise SecurityError(f"holds an object that claims to be a tensor. {_what_is_named(error)}") from None


@contextmanager
def data_only() -> Iterator[list[SecurityError]]:
    """A context in which torch reads pickles in this process as data, whatever the call requests.

    Yields the list of rejected names, because torch and Megatron-Core replace these errors by others.

    Raises:
        SecurityError: the environment turns torch's safe loading off.
    """
    if os.environ.get(_UNSAFE, "").lower() in ("1", "y", "yes", "true"):
        raise SecurityError(f"{_UNSAFE} is set, so torch would run code from a checkpoint. Unset this variable.")
    filesystem: Any = importlib.import_module("torch.distributed.checkpoint.filesystem")
    load, theirs = torch.load, filesystem.pickle
    refused: list[SecurityError] = []

    def load_metadata(file: Any) -> Any:
        try:
            return _load_metadata(file)
        except SecurityError as error:
            refused.append(error)
            raise

    @functools.wraps(load)
    def load_data(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.serialization.safe_globals(_DATA):
                return load(*args, **{**kwargs, "weights_only": True})
        except pickle.UnpicklingError as error:
            refused.append(SecurityError(_what_is_named(error)))
            raise refused[-1] from error

    torch.load = load_data
    filesystem.pickle = types.SimpleNamespace(load=load_metadata, dump=pickle.dump)
    try:
        yield refused
    finally:
        torch.load, filesystem.pickle = load, theirs


def _load_metadata(file: Any) -> Any:
    """The metadata, with the names that norms have in our checkpoints (`nemo2.mcore.parallel.norm_names`)."""
    metadata = _MetadataUnpickler(file).load()
    weights = Path(file.name).parent  # torch opens the file by its path, as this function does
    stored = (getattr(metadata, "storage_data", None) or {}).values()
    for name in {getattr(info, "relative_path", None) for info in stored}:
        if why := why_not_inside(weights, name):
            raise SecurityError(
                f"{_METADATA} names the file {name!r}, which {why}, but nemo2 reads a checkpoint from its own folder "
                "only."
            )
    return renamed(metadata, renamed_norms(getattr(metadata, "state_dict_metadata", None) or {}))


def renamed(metadata: Any, names: Mapping[str, str]) -> Any:
    """The metadata with other names of tensors, by their names in the files."""
    if not names:
        return metadata
    return replace(
        metadata,
        state_dict_metadata={names.get(name, name): entry for name, entry in metadata.state_dict_metadata.items()},
        storage_data={
            replace(index, fqn=names.get(index.fqn, index.fqn)): info
            for index, info in (metadata.storage_data or {}).items()
        },
    )


def _what_is_named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    named = text.partition("GLOBAL ")[2].partition(" was not")[0] or text.partition("Unsupported ")[2][:80]
    what = f"names {named}" if named else "holds more than data"
    return (
        f"An object in the checkpoint {what}, and loading it could run code. nemo2 ran none of it. Checkpoints of "
        "nemo2 contain only tensors, numbers and text. Convert a checkpoint that contains objects on a machine where "
        "you trust it."
    )
