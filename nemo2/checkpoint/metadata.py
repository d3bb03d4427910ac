# SPDX-License-Identifier: Apache-2.0
"""The index of a ``torch_dist`` folder, ``.metadata``, read as data: torch's reader would run the pickle.

Files must be in the checkpoint's folder. A link or a path in ``.metadata`` that leads out of it is rejected.
"""

import pickle
import re
from collections.abc import Mapping
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
_METADATA = ".metadata"
_CONFIG = "metadata.json"
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
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
            return load_metadata(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or f'it {error}'}.") from error
    except SecurityError as error:
        raise SecurityError(f"{weights}: {error}") from None
    except Exception as error:  # unpickling garbage raises anything
        raise CheckpointError(
            f"{path} is damaged, or was written by a newer torch than the installed {torch.__version__}, and cannot be "
            f"unpickled ({type(error).__name__}). Load another checkpoint, or upgrade torch."
        ) from error


def stacks_layers(weights: Path) -> bool:
    """Whether the layers of a model are stacked along a dimension of its tensors, which no other number of layers fits. False
    too: the names of the tensors can't be read."""
    try:
        names = read_metadata(weights).state_dict_metadata
    except CheckpointError:  # the rules about files name it
        return False
    return any(re.search(r"\.layers\.\D", name) for name in names)


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
    metadata = read_metadata(weights)
    if not (weights / COMMON).is_file() and COMMON_OBJECT not in metadata.state_dict_metadata:
        return f"{COMMON} is missing"
    return next((f"{name} {why}" for name, why in lost_shards(weights, metadata).items()), None)


def lost_shards(weights: Path, metadata: Any) -> dict[str, str]:
    """The files in the index ``metadata`` that are missing or too short, with a clause that says so."""
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    lost = {}
    for name, length in sorted(needed.items()):
        if not (weights / name).is_file():
            lost[name] = "is missing"
        elif (size := (weights / name).stat().st_size) < length:
            lost[name] = f"has {size} bytes, but {length} are needed"
    return lost


def load_metadata(file: Any) -> Any:
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
