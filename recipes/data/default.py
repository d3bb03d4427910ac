# SPDX-License-Identifier: Apache-2.0
"""Data by name, as configs of data modules. Names and sizes are those of NeMo 2.0's command line."""

from typing import Any

from nemo2.config import Config


def mock(seq_length: int = 4096, global_batch_size: int = 16, micro_batch_size: int = 2) -> Config[Any]:
    """Random tokens, the same in every run.

    Args:
        seq_length: Tokens per sample.
        global_batch_size: Samples per optimizer step, over all ranks.
        micro_batch_size: Samples per forward pass of a rank.
    """
    from nemo2.data.mock import MockDataModule

    return _sized(MockDataModule, seq_length, global_batch_size, micro_batch_size)


def squad(seq_length: int = 4096, global_batch_size: int = 16, micro_batch_size: int = 2) -> Config[Any]:
    """SQuAD's questions about a paragraph, downloaded in the first run.

    Args:
        seq_length: Tokens per sample.
        global_batch_size: Samples per optimizer step, over all ranks.
        micro_batch_size: Samples per forward pass of a rank.
    """
    from nemo2.data.finetuning.published import SquadDataModule

    return _sized(SquadDataModule, seq_length, global_batch_size, micro_batch_size)


def dolly(seq_length: int = 4096, global_batch_size: int = 16, micro_batch_size: int = 2) -> Config[Any]:
    """Dolly's instructions and answers, downloaded in the first run.

    Args:
        seq_length: Tokens per sample.
        global_batch_size: Samples per optimizer step, over all ranks.
        micro_batch_size: Samples per forward pass of a rank.
    """
    from nemo2.data.finetuning.published import DollyDataModule

    return _sized(DollyDataModule, seq_length, global_batch_size, micro_batch_size)


def alpaca(seq_length: int = 4096, global_batch_size: int = 16, micro_batch_size: int = 2) -> Config[Any]:
    """Instructions about Python, downloaded in the first run.

    Args:
        seq_length: Tokens per sample.
        global_batch_size: Samples per optimizer step, over all ranks.
        micro_batch_size: Samples per forward pass of a rank.
    """
    from nemo2.data.finetuning.published import AlpacaDataModule

    return _sized(AlpacaDataModule, seq_length, global_batch_size, micro_batch_size)


def hf_dataset(path: str) -> Config[Any]:
    """Records in a folder of tables or JSON lines, or of a dataset on the Hugging Face hub.

    Args:
        path: The folder, or the name of the dataset on the hub.
    """
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule

    return Config(HFDatasetDataModule, path_or_dataset=path)


def _sized(kind: type, seq_length: int, global_batch_size: int, micro_batch_size: int) -> Config[Any]:
    return Config(kind, seq_length=seq_length, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
