# SPDX-License-Identifier: Apache-2.0
"""The samples of a split in files: all ids in a row, the trained flags, and the end of each sample.

The files are in a folder that only this user can write to, each with its SHA-256 (`nemo2.data.index_cache`). The
folder's name derives from everything that determines the samples: the data's contents, the tokenizer, the template, the
length. Rank 0 writes the files, and every process memory-maps them.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo2.data.finetuning.encode import Report
from nemo2.data.finetuning.sample import Sample
from nemo2.data.index_cache import read_array, write_array

_REPORT = "report"
_ARRAYS = ("ids", "trained", "ends", _REPORT)


class Samples:
    """Samples that `write_samples` has written. After pickling, the receiving process maps the files again."""

    def __init__(self, folder: Path, name: str, *, by_hash: bool = False) -> None:
        self.folder, self.name = folder, name
        arrays = {part: read_array(path_of(self.folder, self.name, part), by_hash=by_hash) for part in _ARRAYS}
        self._ids, self._trained, self._ends = (arrays[part] for part in _ARRAYS[:3])
        self.report = Report(**json.loads(arrays[_REPORT].tobytes()))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        ids, trained = self.arrays(index)
        return Sample(ids.tolist(), trained.tolist())

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and flags of a sample, as views of the files."""
        part = slice(int(self._ends[index - 1]) if index else 0, int(self._ends[index]))
        return self._ids[part], self._trained[part]

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sample."""
        return np.diff(self._ends, prepend=0)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def write_samples(folder: Path, name: str, samples: Iterable[Sample], report: Report) -> None:
    """Write all ``samples``. ``report`` is read after the last one."""
    # Arrays rather than lists, because an int in a list takes ten times the memory.
    ids, trained, ends = array("i"), array("b"), array("q")
    for sample in samples:
        ids.extend(sample.ids)
        trained.extend(sample.trained)
        ends.append(len(ids))
    report_bytes = np.frombuffer(json.dumps(vars(report)).encode(), np.uint8)
    arrays = np.asarray(ids), np.asarray(trained).view(np.bool_), np.asarray(ends), report_bytes
    for part, values in zip(_ARRAYS, arrays, strict=True):
        write_array(path_of(folder, name, part), values)


def key_of(facts: Mapping[str, Any]) -> str:
    """The name of the folder of samples that these facts determine, the same in every process."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def path_of(folder: Path, name: str, part: str) -> Path:
    """The file of one part of the samples ``name``."""
    return folder / f"{name}-{part}.npy"
