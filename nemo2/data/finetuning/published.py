# SPDX-License-Identifier: Apache-2.0
"""Published instruction sets: `SquadDataModule`, `DollyDataModule`, `AlpacaDataModule`.

The first run downloads the set from the Hugging Face hub (package ``datasets``) and writes ``training.jsonl``,
``validation.jsonl`` and ``test.jsonl``. Later runs use these files. A folder that already has them, for example from
another machine, needs neither the hub nor the package.
"""

import json
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import numpy as np

from nemo2.base.errors import ConfigError, DataError, RuntimeFault
from nemo2.base.files import replacing
from nemo2.config.capture import configurable
from nemo2.data.base import arguments_of
from nemo2.data.finetuning import open as opening
from nemo2.data.finetuning.module import FILES, FineTuningDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.home import datasets_home
from nemo2.data.tokenizer import Tokenizer

Splits = Mapping[str, Sequence[Any]]
_RAW = "raw"


class PublishedDataModule(FineTuningDataModule):
    """A set on the hub. Subclasses define the set and the conversion of its records to input and output."""

    hub: ClassVar[str]
    folder: ClassVar[str]
    """The set's folder in `nemo2.data.home.datasets_home`."""
    shares: ClassVar[Mapping[str, float]] = {"train": 0.80, "validation": 0.15, "test": 0.05}
    """The fractions of the set's training records that make up each split."""
    seed: int

    def __init__(
        self,
        seq_length: int = 2048,
        tokenizer: Optional[Tokenizer] = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Optional[list[int]] = None,
        force_redownload: bool = False,
        delete_raw: bool = True,
        seed: int = 1234,
        memmap_workers: int = 1,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        packed_sequence_specs: Optional[PackedSequenceSpecs] = None,
        dataset_kwargs: Optional[dict[str, Any]] = None,
        dataset_root: Optional[Union[str, Path]] = None,
    ) -> None:
        dataset_root = datasets_home() / self.folder if dataset_root is None else dataset_root
        super().__init__(**arguments_of(FineTuningDataModule, locals()))
        self.force_redownload = force_redownload
        self.delete_raw = delete_raw

    @property
    def _fetched(self) -> bool:
        return (self.root / FILES["train"]).is_file() and not self.force_redownload

    def check_records(self, tokenizer: Any, **how: Any) -> None:
        if self._fetched:
            super().check_records(tokenizer, **how)
        else:
            self.check_download()

    def check_download(self) -> None:
        """Check what a download needs, without a network.

        Raises:
            ConfigError: the package ``datasets`` is missing.
        """
        opening.datasets_package(f"The dataset {self.hub!r}")

    def fetch(self) -> None:
        """Download the set and write the three files, unless they exist and no new download is requested.

        Raises:
            DataError: the set is unavailable, or the folder is not writable.
        """
        if self._fetched:
            return
        held = self.download()
        try:
            # All are renamed once all are written, because an older training file may hold the new one's validation. The
            # training file last, because it marks the set as complete.
            with ExitStack() as files:
                for split, records in sorted(self.splits(held).items(), key=lambda item: item[0] != "train"):
                    unfinished = files.enter_context(replacing(self.root / FILES[split]))
                    file = files.enter_context(open(unfinished, "w", encoding="utf-8"))
                    file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            if self.delete_raw:
                shutil.rmtree(self.root / _RAW, ignore_errors=True)
        except (OSError, ConfigError, RuntimeFault) as error:
            raise DataError(
                f"{self.root} is not writable ({str(error).rstrip('.')}). Set data.dataset_root to a writable folder."
            ) from error

    def download(self) -> Splits:
        """The data set from the hub, by its own splits.

        Raises:
            ConfigError: the set is unavailable.
            DataError: the set is unavailable.
        """
        options: dict[str, Any] = {"download_mode": "force_redownload"} if self.force_redownload else {}
        return opening.load(self.hub, cache_dir=str(self.root / _RAW), **options)

    def splits(self, held: Splits) -> Mapping[str, Iterable[dict[str, Any]]]:
        """The records of "train", "validation" and "test", in the form of the files, in an order drawn from the seed. The
        last split has the remainder."""
        records = held["train"]
        order = np.random.default_rng(self.seed).permutation(len(records)).tolist()
        fractions = np.cumsum([*self.shares.values()][:-1])
        cuts = [0, *(int(len(records) * fraction) for fraction in fractions), len(records)]
        parts = zip(self.shares, cuts[:-1], cuts[1:], strict=True)
        return {name: (self.record(records[index]) for index in order[start:end]) for name, start, end in parts}

    @abstractmethod
    def record(self, held: Any) -> dict[str, Any]:
        """A record in the form of the files."""


@configurable
class SquadDataModule(PublishedDataModule):
    """Fine-tune on SQuAD 1.1: questions about a paragraph, answered with words from it.

    5% of its training questions are for validation, and its own validation questions are for the test. The arguments
    that are not listed here are those of `FineTuningDataModule`.

    Args:
        dataset_root: A folder with the three files, or where to write them. None: ``squad`` under `datasets_home`.
        force_redownload: Download the set again.
        delete_raw: Delete the download once the files are written.

    Raises:
        ConfigError: both the files and the package ``datasets`` are missing.
        DataError: the set is unavailable.
    """

    hub = "rajpurkar/squad"
    folder = "squad"
    shares = {"train": 0.95, "validation": 0.05}

    def __init__(
        self,
        dataset_root: Optional[Union[str, Path]] = None,
        seq_length: int = 2048,
        tokenizer: Optional[Tokenizer] = None,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Optional[list[int]] = None,
        force_redownload: bool = False,
        delete_raw: bool = True,
        seed: int = 1234,
        memmap_workers: int = 1,
        num_workers: int = 8,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        packed_sequence_specs: Optional[PackedSequenceSpecs] = None,
        dataset_kwargs: Optional[dict[str, Any]] = None,
    ) -> None:
        super().__init__(**arguments_of(PublishedDataModule, locals()))

    def splits(self, held: Splits) -> Mapping[str, Iterable[dict[str, Any]]]:
        return {**super().splits(held), "test": map(self.record, held["validation"])}

    def record(self, held: Mapping[str, Any]) -> dict[str, Any]:
        answers = held["answers"]["text"]
        question = f"Context: {held['context']} Question: {held['question']} Answer:"
        return {"input": question, "output": answers[0], "original_answers": answers}


@configurable
class DollyDataModule(PublishedDataModule):
    """Fine-tune on Dolly 15k: instructions with answers. Some refer to a text, which the seed places before or after
    the instruction.

    The arguments and errors that are not listed here are those of `SquadDataModule`.

    Args:
        dataset_root: A folder with the three files, or where to write them. None: ``dolly`` under `datasets_home`.
    """

    hub = "databricks/databricks-dolly-15k"
    folder = "dolly"

    def record(self, held: Mapping[str, Any]) -> dict[str, Any]:
        parts = [part for part in (held["instruction"].strip(), (held.get("context") or "").strip()) if part]
        if np.random.default_rng([self.seed, *"".join(parts).encode()[:64]]).integers(2):
            parts.reverse()
        return {"input": "\n\n".join(parts), "output": held["response"], "category": held.get("category")}


@configurable
class AlpacaDataModule(PublishedDataModule):
    """Fine-tune on 18k instructions about Python in Alpaca's format.

    The arguments and errors that are not listed here are those of `SquadDataModule`.

    Args:
        dataset_root: A folder with the three files, or where to write them. None: ``alpaca`` under `datasets_home`.
    """

    hub = "iamtarun/python_code_instructions_18k_alpaca"
    folder = "alpaca"

    def record(self, held: Mapping[str, Any]) -> dict[str, Any]:
        return {"input": held["prompt"].partition("### Output")[0], "output": held["output"]}
