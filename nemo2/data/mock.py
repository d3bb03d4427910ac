# SPDX-License-Identifier: Apache-2.0
"""`MockDataModule`: random tokens of the right shape, from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nemo2.base.errors import ConfigError
from nemo2.config.aliases import register_gone
from nemo2.config.capture import configurable
from nemo2.data.base import NUM_SAMPLES, SPLITS, MegatronDataModule, arguments_of, no_files
from nemo2.data.tokenizer import GPT2BPETokenizer, NullTokenizer, Tokenizer

GPT2_VOCAB_SIZE = 50257
register_gone("nemo2.data.mock:MockDataModule", paths=no_files)


@configurable
@dataclass(eq=False, repr=False)
class MockDataModule(MegatronDataModule):
    """Provide uniformly random tokens without files or network, to time a recipe, test it or try it out.

    Sample i of a split is the same in every process and every run: it depends only on the seed, the split and i. A
    model can learn nothing from the data, and the best loss is ``log(vocab_size)``.

    An item has ``tokens`` and ``labels`` (int64, ``[seq_length]``, labels one token ahead), ``loss_mask`` (float32, all
    ones), ``position_ids`` (int64) and optionally ``attention_mask`` (bool, ``[1, seq_length, seq_length]``, True where
    attention is forbidden).

    Args:
        seq_length: Tokens per sample.
        tokenizer: A tokenizer, of which only the vocabulary size matters. None: a `NullTokenizer` with GPT-2's 50257
            ids, or GPT-2's own tokenizer if `vocab_file` and `merges_file` are given.
        micro_batch_size, global_batch_size, rampup_batch_size: See `MegatronDataSampler`.
        num_train_samples, num_val_samples, num_test_samples: The sizes of the splits. Longer training repeats them.
        num_workers, pin_memory, persistent_workers: See `torch.utils.data.DataLoader`.
        create_attention_mask: Whether items hold a mask. Attention kernels make causal masks themselves.
        vocab_file, merges_file: GPT-2's vocab.json and merges.txt.
        seed: The seed of the random tokens.
    """

    valid_numbers = {**MegatronDataModule.valid_numbers, **NUM_SAMPLES}

    seq_length: int = 2048
    tokenizer: Optional[Tokenizer] = None
    micro_batch_size: int = 4
    global_batch_size: int = 8
    rampup_batch_size: Optional[list[int]] = None
    num_train_samples: int = 10_000_000
    num_val_samples: int = 10_000
    num_test_samples: int = 10_000
    num_workers: int = 8
    pin_memory: bool = True
    persistent_workers: bool = False
    create_attention_mask: bool = False
    vocab_file: Optional[str] = None
    merges_file: Optional[str] = None
    seed: int = 1234

    def __post_init__(self) -> None:
        super().__init__(**arguments_of(MegatronDataModule, vars(self)))
        if (self.vocab_file is None) != (self.merges_file is None):
            raise ConfigError("vocab_file and merges_file are two halves of one tokenizer: give both or neither.")
        if self.vocab_file is not None and self.tokenizer is not None:
            raise ConfigError("tokenizer and vocab_file/merges_file both name a vocabulary: give one of them.")
        if self.vocab_file is not None and self.merges_file is not None:
            self.tokenizer = GPT2BPETokenizer(self.vocab_file, self.merges_file)
        self.tokenizer = self.tokenizer or NullTokenizer(GPT2_VOCAB_SIZE)

    def no_samples(self, split: str) -> Optional[str]:
        name = {"train": "num_train_samples", "validation": "num_val_samples", "test": "num_test_samples"}[split]
        samples = getattr(self, name)
        return None if samples else f"data.{name}={samples!r} leaves no samples. Set it to 1 or more."

    def build_datasets(self, splits: Sequence[str]) -> dict[str, Optional[Dataset]]:
        sizes = {"train": self.num_train_samples, "validation": self.num_val_samples, "test": self.num_test_samples}
        vocab_size = GPT2_VOCAB_SIZE if self.tokenizer is None else self.tokenizer.vocab_size
        datasets: dict[str, Optional[Dataset]] = dict.fromkeys(splits)
        for split in splits:
            if sizes[split]:
                datasets[split] = MockGPTDataset(
                    vocab_size=vocab_size,
                    seq_length=self.seq_length,
                    num_samples=sizes[split],
                    seed=(self.seed, SPLITS.index(split)),
                    create_attention_mask=self.create_attention_mask,
                )
        return datasets


@dataclass(kw_only=True, eq=False)
class MockGPTDataset(Dataset[dict[str, Tensor]]):
    """Random samples in the format of Megatron's GPTDataset. Sample i is drawn from (seed, i)."""

    vocab_size: int
    seq_length: int
    num_samples: int
    seed: tuple[int, ...] = (1234,)
    create_attention_mask: bool = False

    def __post_init__(self) -> None:
        self._constant = {
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }
        if self.create_attention_mask:
            forbidden = torch.ones(self.seq_length, self.seq_length, dtype=torch.bool).triu(diagonal=1)
            self._constant["attention_mask"] = forbidden.unsqueeze(0)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        random = np.random.default_rng([*self.seed, index])
        text = torch.from_numpy(random.integers(self.vocab_size, size=self.seq_length + 1, dtype=np.int64))
        return {"tokens": text[:-1], "labels": text[1:], **self._constant}


def is_mock(data: Any) -> bool:
    """Whether a data module, or its config, provides random tokens."""
    return isinstance(data, MockDataModule) or getattr(data, "__fn_or_cls__", None) is MockDataModule
