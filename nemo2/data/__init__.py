# SPDX-License-Identifier: Apache-2.0
"""Data: tokenizers, text to token files, data modules, and the sampler that turns samples into steps.

Names are resolved on first use, so importing the package imports neither torch nor Megatron-Core.
"""

from typing import TYPE_CHECKING

from nemo2.lazy import lazy_names

if TYPE_CHECKING:
    from nemo2.data.base import MegatronDataModule
    from nemo2.data.bpe import train_bpe
    from nemo2.data.mock import MockDataModule
    from nemo2.data.prepare import PreparedData, prepare_data
    from nemo2.data.pretraining import PreTrainingDataModule
    from nemo2.data.sampler import DataSampler, MegatronDataSampler, WrappedDataLoader
    from nemo2.data.stdlib import DemoData, prepare_demo_data, python_stdlib_corpus
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
    "DemoData",
    "GPT2BPETokenizer",
    "MegatronDataModule",
    "MegatronDataSampler",
    "MockDataModule",
    "NullTokenizer",
    "PreTrainingDataModule",
    "PreparedData",
    "Tokenizer",
    "WrappedDataLoader",
    "get_vocab_size",
    "prepare_data",
    "prepare_demo_data",
    "python_stdlib_corpus",
    "train_bpe",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AutoTokenizer": "nemo2.data.tokenizer",
        "BPETokenizer": "nemo2.data.tokenizer",
        "ByteTokenizer": "nemo2.data.tokenizer",
        "DemoData": "nemo2.data.stdlib",
        "DataSampler": "nemo2.data.sampler",
        "GPT2BPETokenizer": "nemo2.data.tokenizer",
        "MegatronDataModule": "nemo2.data.base",
        "MegatronDataSampler": "nemo2.data.sampler",
        "MockDataModule": "nemo2.data.mock",
        "NullTokenizer": "nemo2.data.tokenizer",
        "PreTrainingDataModule": "nemo2.data.pretraining",
        "PreparedData": "nemo2.data.prepare",
        "Tokenizer": "nemo2.data.tokenizer",
        "WrappedDataLoader": "nemo2.data.sampler",
        "prepare_data": "nemo2.data.prepare",
        "prepare_demo_data": "nemo2.data.stdlib",
        "python_stdlib_corpus": "nemo2.data.stdlib",
        "train_bpe": "nemo2.data.bpe",
        "get_vocab_size": "nemo2.data.tokenizer",
    },
)
