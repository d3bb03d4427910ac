# SPDX-License-Identifier: Apache-2.0
"""`StdlibDataModule`: the sources of Python's standard library, prepared on first use. Real text without a download."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Optional

from torch.utils.data import Dataset

from nemo2.base.place import here
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.config.domains import Domain
from nemo2.data.base import MegatronDataModule, arguments_of, no_files
from nemo2.data.home import datasets_home
from nemo2.data.pretraining import SHUFFLE_SEED, PreTrainingDataModule
from nemo2.data.stdlib import DemoData, prepare_demo_data
from nemo2.data.tokenizer import BPETokenizer, Tokenizer

_log = logging.getLogger(__name__)
register_gone("nemo2.data.demo:StdlibDataModule", paths=no_files)


@configurable
@dataclass(eq=False, repr=False)
class StdlibDataModule(MegatronDataModule):
    """Pre-train on the running interpreter's standard library, with a BPE tokenizer trained on it.

    The tokenizer and the token files are created on first use, which takes about half a minute, and are reused
    afterwards. Concurrent processes wait for the one that creates them. Every 20th file is for validation. There is no
    test split.

    Args:
        directory: The folder of the files. None: ``stdlib`` in ``$NEMO_DATASETS_CACHE``, which defaults to
            ``$NEMO_HOME/datasets``, and ``$NEMO_HOME`` to ``~/.cache/nemo2``.
        vocab_size: The vocabulary size of the tokenizer.
        max_bytes: The amount of the library's text to use.
        seq_length, micro_batch_size, global_batch_size, num_workers, seed: See `PreTrainingDataModule`.

    Raises:
        DataError: on first use, if the directory is not writable or this interpreter has no sources.
    """

    valid_numbers = {
        **MegatronDataModule.valid_numbers,
        "vocab_size": Domain("[257, inf)", "256 bytes plus the token at the end of a document", "whole"),
        "max_bytes": Domain("[1, inf)", "a number of bytes", "whole"),
        "seed": SHUFFLE_SEED,
    }

    directory: Optional[str] = None
    vocab_size: int = 4096
    max_bytes: int = 12_000_000
    seq_length: int = 256
    micro_batch_size: int = 4
    global_batch_size: int = 8
    num_workers: int = 0
    seed: int = 1234

    def __post_init__(self) -> None:
        super().__init__(**arguments_of(MegatronDataModule, vars(self)))

    @cached_property
    def prepared(self) -> DemoData:
        """The files, created now if they don't exist."""
        place = Path(self.directory) if self.directory is not None else datasets_home() / "stdlib"
        if here().local_rank == 0:
            _log.info(
                ("Looking for tokens of Python's standard library in %s. Creating them takes half a minute, once."),
                place,
            )
        return prepare_demo_data(place, self.vocab_size, max_bytes=self.max_bytes)

    @cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        return BPETokenizer(self.prepared.tokenizer)

    def prepare_data(self) -> None:
        """Called by Lightning in one process per node before any other hook."""
        _ = self.prepared

    def build_datasets(self, splits: Sequence[str]) -> dict[str, Optional[Dataset]]:
        return self._files.build_datasets(splits)

    @cached_property
    def _files(self) -> PreTrainingDataModule:
        module = PreTrainingDataModule(
            paths={"train": [self.prepared.train], "validation": [self.prepared.validation]},
            seq_length=self.seq_length,
            tokenizer=self.tokenizer,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
        )
        module.trainer = self.trainer  # its steps decide the number of samples
        return module
