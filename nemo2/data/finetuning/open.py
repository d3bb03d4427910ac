# SPDX-License-Identifier: Apache-2.0
"""Reads records from a ``datasets`` object, lists, a folder of tables, JSON or CSV, or a name on the hub."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from nemo2.base.backend.extras import has, why_missing
from nemo2.base.errors import ConfigError, DataError
from nemo2.data.documents import RECORD_SUFFIXES, holds_records, suffix_of
from nemo2.data.finetuning.sources import RecordFiles, Records, Source
from nemo2.data.hub import asking_hub

ALIASES: Mapping[str, Sequence[str]] = {
    "train": ("train", "training"),
    "validation": ("val", "validation", "valid", "eval", "dev"),
    "test": ("test", "testing"),
}
"""Names that a split may have."""
_TABLES = (".parquet", ".arrow")


def open_split(held: Any, names: Sequence[str], *, whole: bool, streaming: bool = False) -> Optional[Source]:
    """The records of the split that has one of these names. None: there is none.

    Args:
        held: The splits by name, the records of one split, the path of a folder or file with records, or a dataset's name
            on the hub.
        whole: Whether records that aren't divided into splits are this split.
        streaming: Read tables and the hub's files during training, without copying them into a cache first.

    Raises:
        DataError: the path doesn't exist, or the hub can't be reached.
        ConfigError: the package ``datasets`` is needed and isn't installed.
    """
    if isinstance(held, str | Path):
        return _of_path(held, names, whole=whole, streaming=streaming)
    if isinstance(held, Mapping):
        split = next((name for name in names if name in held), None)
        return None if split is None else Records(held[split], split)
    if not isinstance(held, Iterable):
        raise ConfigError(
            f"data.path_or_dataset is a {type(held).__name__}: must be records, splits of records by name, or a path."
        )
    return Records(held, names[0]) if whole else None


def _of_path(path: str | Path, names: Sequence[str], *, whole: bool, streaming: bool) -> Optional[Source]:
    place = Path(path).expanduser()
    if place.is_file():
        return _of_files([place], streaming=streaming) if whole else None
    if place.is_dir():
        if not (files := _data_files(place)):
            raise DataError(
                f"{path}: this folder has no data files, which end in {', '.join(RECORD_SUFFIXES + _TABLES)}."
            )
        files = _files_of_split(place, files, names, whole=whole)
        return _of_files(files, streaming=streaming) if files else None
    if not on_hub(path):
        raise DataError(f"data.path_or_dataset={str(path)!r}: this file or folder does not exist.")
    splits = load(str(path), streaming=streaming)
    split = next((name for name in names if name in splits), None)
    return None if split is None else Records(splits[split], split)


def on_hub(held: Any) -> bool:
    """Whether ``held`` is the name of a dataset on the hub."""
    if not isinstance(held, str | Path):
        return False
    place = Path(held).expanduser()
    return not (place.exists() or place.is_absolute() or str(held).startswith((".", "~")))


def _data_files(folder: Path) -> list[Path]:
    """The files with records in a folder, except the samples that a run keeps beside its data."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and (holds_records(file) or file.suffix in _TABLES)
        and "index_cache" not in file.relative_to(folder).parts
    )
    # Beside files of other types, a .json that names no split describes the set.
    return [file for file in files if file.suffix != ".json" or _split_of(file, file.parent, ())] or files


def _files_of_split(folder: Path, files: list[Path], names: Sequence[str], *, whole: bool) -> list[Path]:
    """Those of a folder's files that belong to a split: a file of the split's name, and files whose names begin with it, as
    on the hub (train-00000-of-00002.parquet). Files that name no split are those of the ``whole`` split."""
    of_split = [file for file in files if _split_of(file, folder, names) in names]
    if of_split or not whole:
        return of_split
    return [file for file in files if _split_of(file, folder, names) is None]


def _split_of(file: Path, folder: Path, names: Sequence[str]) -> Optional[str]:
    aliases = {*names, *(name for known in ALIASES.values() for name in known)}
    for part in reversed(file.relative_to(folder).parts):
        word = part.replace("_", "-").replace(".", "-").split("-")[0]
        if word in aliases:
            return word
    return None


def _of_files(files: list[Path], *, streaming: bool) -> Source:
    kinds = {suffix_of(file) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{files[0].parent} contains files of several types for one split ({', '.join(sorted(kinds))}). Use one "
            "type."
        )
    if holds_records(files[0]):
        return RecordFiles(*files)
    if not kinds <= set(_TABLES):
        raise DataError(f"{files[0]} is no data file: these end in {', '.join(RECORD_SUFFIXES + _TABLES)}.")
    name = f"{files[0].parent}/*{files[0].suffix}"
    package = datasets_package(name)
    try:
        options = {"data_files": [str(file) for file in files], "split": "train", "streaming": streaming}
        return Records(package.load_dataset(files[0].suffix[1:], **options), name)
    except Exception as error:  # the package and pyarrow raise many types of errors
        raise DataError(f"{name} can't be read: {type(error).__name__}: {' '.join(str(error).split())}") from error


def load(name: str, *, streaming: bool = False, **options: Any) -> Mapping[str, Any]:
    """The splits of a dataset on the Hugging Face hub, or in its local cache.

    Raises:
        DataError: the dataset is unavailable.
    """
    package = datasets_package(name)
    try:
        with asking_hub(name):
            return package.load_dataset(name, streaming=streaming, **options)
    except Exception as error:  # the package raises any error of its readers and of the network
        raise DataError(
            f"The dataset {name!r} cannot be loaded from this machine or from the Hugging Face hub "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Check the name. Without a network, copy "
            "the files to this machine and name their folder."
        ) from error


def datasets_package(what: str) -> Any:
    """The package ``datasets``, which ``what`` needs.

    Raises:
        ConfigError: it isn't installed.
    """
    if not has("datasets"):
        raise ConfigError(
            f"{what} requires the package datasets: {why_missing('datasets')}. Files of JSON or CSV need no package."
        )
    import datasets

    return datasets
