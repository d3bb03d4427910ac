# SPDX-License-Identifier: Apache-2.0
"""Data: tokenizers, text to token files, data modules, and the sampler that turns samples into steps.

Names are resolved on first use, so importing the package imports neither torch nor Megatron-Core.
"""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if TYPE_CHECKING:
    from nemo2.data.base import MegatronDataModule
    from nemo2.data.mock import MockDataModule
    from nemo2.data.sampler import DataSampler, MegatronDataSampler, WrappedDataLoader
    from nemo2.data.tokenizer import (
        AutoTokenizer,
        BPETokenizer,
        ByteTokenizer,
        GPT2BPETokenizer,
        NullTokenizer,
        Tokenizer,
        get_vocab_size,
    )

__all__ = [
    "AutoTokenizer",
    "BPETokenizer",
    "ByteTokenizer",
    "DataSampler",
    "GPT2BPETokenizer",
    "MegatronDataModule",
    "MegatronDataSampler",
    "MockDataModule",
    "NullTokenizer",
    "Tokenizer",
    "WrappedDataLoader",
    "get_vocab_size",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AutoTokenizer": "nemo2.data.tokenizer",
        "BPETokenizer": "nemo2.data.tokenizer",
        "ByteTokenizer": "nemo2.data.tokenizer",
        "DataSampler": "nemo2.data.sampler",
        "GPT2BPETokenizer": "nemo2.data.tokenizer",
        "MegatronDataModule": "nemo2.data.base",
        "MegatronDataSampler": "nemo2.data.sampler",
        "MockDataModule": "nemo2.data.mock",
        "NullTokenizer": "nemo2.data.tokenizer",
        "Tokenizer": "nemo2.data.tokenizer",
        "WrappedDataLoader": "nemo2.data.sampler",
        "get_vocab_size": "nemo2.data.tokenizer",
    },
)
