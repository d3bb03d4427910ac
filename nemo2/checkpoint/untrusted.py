# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron-Core's checkpoint files as data, also from untrusted sources.

The format has pickles in three places, and their readers would run them. torch opens ``.metadata`` with `pickle.load`,
and objects inside the shards with ``torch.load(weights_only=False)``. It reads ``common.pt`` with its safe default,
which an environment variable turns off. Inside `data_only` all three may only name the contents of a checkpoint
(`metadata` has those of the first).
"""

import functools
import importlib
import io
import os
import pathlib
import pickle
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.checkpoint.metadata import load_metadata

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
_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_DATA = [io.BytesIO, pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath]
"""Classes that torch's safe loading accepts besides its own. Transformer Engine keeps its FP8 state in a BytesIO."""


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

    def load_index(file: Any) -> Any:
        try:
            return load_metadata(file)
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
    filesystem.pickle = types.SimpleNamespace(load=load_index, dump=pickle.dump)
    try:
        yield refused
    finally:
        torch.load, filesystem.pickle = load, theirs


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


def _what_is_named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    named = text.partition("GLOBAL ")[2].partition(" was not")[0] or text.partition("Unsupported ")[2][:80]
    what = f"names {named}" if named else "holds more than data"
    return (
        f"An object in the checkpoint {what}, and loading it could run code. nemo2 ran none of it. Checkpoints of "
        "nemo2 contain only tensors, numbers and text. Convert a checkpoint that contains objects on a machine where "
        "you trust it."
    )
