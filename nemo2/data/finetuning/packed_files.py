# SPDX-License-Identifier: Apache-2.0
"""Tokenized and packed samples of one file, under the names of NeMo 2.0's ``packed_sequence`` module."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from nemo2.base.errors import ConfigError
from nemo2.data.finetuning.module import ChatDataModule, FineTuningDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs as PackedSequenceSpecs
from nemo2.data.finetuning.sources import RecordFiles, Source
from nemo2.data.tokenizer import Tokenizer

_PathLike = Union[str, Path]


def tokenize_dataset(
    path: _PathLike,
    tokenizer: Tokenizer,
    max_seq_length: int,
    seed: Optional[int] = None,
    dataset_kwargs: Optional[Mapping[str, Any]] = None,
) -> list[dict[str, np.ndarray]]:
    """The samples of a file, as training reads them.

    Args:
        path: A file of records, as in `FineTuningDataModule`.
        tokenizer: The model's tokenizer.
        max_seq_length: The length of the longest sample.
        seed: Has no effect, because the samples have the order of the file.
        dataset_kwargs: As in `FineTuningDataModule`. ``chat=True`` reads conversations, as in `ChatDataModule`.

    Returns:
        For each sample ``input_ids`` and ``loss_mask``, which is True for the tokens that are trained on.

    Raises:
        DataError: as in `FineTuningDataModule`.
    """
    samples = _module_of(path, tokenizer, max_seq_length, dataset_kwargs).samples("train")
    assert samples is not None  # a file of training samples must exist
    return [dict(zip(("input_ids", "loss_mask"), samples.arrays(index), strict=True)) for index in range(len(samples))]


def prepare_packed_sequence_data(
    input_path: _PathLike,
    output_path: _PathLike,
    output_metadata_path: Optional[_PathLike],
    packed_sequence_size: int,
    tokenizer: Tokenizer,
    max_seq_length: int,
    seed: Optional[int] = 0,
    packing_algorithm: str = "first_fit_shuffle",
    dataset_kwargs: Optional[Mapping[str, Any]] = None,
) -> None:
    """Tokenize and pack the samples of a file ahead of training.

    ``PackedSequenceSpecs(packed_train_data_path=output_path)`` then finds the packs. Without this call a run makes them.

    Args:
        input_path, tokenizer, dataset_kwargs: As in `tokenize_dataset`.
        output_path: The folder of the samples and their packs.
        output_metadata_path: A JSON file that receives how full the rows are. None: no such file.
        packed_sequence_size: Tokens per row.
        max_seq_length: The length of the longest sample. Must equal ``packed_sequence_size``.
        seed: Which samples share a row.
        packing_algorithm: "first_fit_shuffle" or "first_fit_decreasing". Either is best-fit decreasing here, with rows
            in a random order.

    Raises:
        ConfigError: the output is one of NeMo's array files, or the sizes contradict each other.
        DataError: as in `FineTuningDataModule`.
    """
    if max_seq_length != packed_sequence_size:
        raise ConfigError(
            f"max_seq_length={max_seq_length} differs from packed_sequence_size={packed_sequence_size}, but a packed row is "
            "as long as the longest sample may be. Set both to the same number of tokens."
        )
    specs = PackedSequenceSpecs(
        packed_sequence_size,
        packed_train_data_path=str(output_path),
        packed_metadata_path=None if output_metadata_path is None else str(output_metadata_path),
    )
    module = _module_of(input_path, tokenizer, packed_sequence_size, dataset_kwargs, specs=specs, seed=seed or 0)
    module.build_datasets(["train"])


def _module_of(path: _PathLike, tokenizer: Tokenizer, length: int, dataset_kwargs: Any, **settings: Any) -> Any:
    """The data module of one file as its training samples."""
    kwargs = dict(dataset_kwargs or {})
    kind: Any = ChatDataModule if kwargs.pop("chat", False) else FineTuningDataModule
    file = Path(path)

    class OneFile(kind):
        def source(self, split: str) -> Optional[Source]:
            return RecordFiles(file) if split == "train" else None

    specs = settings.pop("specs", None)
    return OneFile(
        file.parent,
        seq_length=length,
        tokenizer=tokenizer,
        micro_batch_size=1,
        packed_sequence_specs=specs,
        dataset_kwargs=kwargs,
        **settings,
    )
