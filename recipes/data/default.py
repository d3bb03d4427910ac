# SPDX-License-Identifier: Apache-2.0
"""Data by name, as configs of data modules. Names and sizes are those of NeMo 2.0's command line."""

from typing import Any

from nemo2.config import Config


def mock(seq_length: int = 4096, global_batch_size: int = 16, micro_batch_size: int = 2) -> Config[Any]:
    """Random tokens, the same in every run."""
    from nemo2.data.mock import MockDataModule

    return Config(
        MockDataModule,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
    )
