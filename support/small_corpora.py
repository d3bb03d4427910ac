# SPDX-License-Identifier: Apache-2.0
"""Corpora of a few thousand tokens, the data module over them, and Megatron-LM's batch sizes."""

from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from nemo2.data.pretraining import PreTrainingDataModule
from nemo2.data.tokenizer import NullTokenizer

VOCAB = 1000
SEQ = 16


def corpus(prefix, documents=60, seed=0, high=VOCAB - 1, end=VOCAB - 1):
    random = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in random.integers(5, 60, size=documents):
        builder.add_document(np.append(random.integers(0, high, size=length), end), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def trainer(**kwargs):
    defaults = {"max_steps": 10, "val_check_interval": 5, "limit_val_batches": 2, "limit_test_batches": 1}
    return SimpleNamespace(**{**defaults, "global_step": 0, **kwargs})


def module(paths, *, steps=None, **kwargs):
    defaults = {"seq_length": SEQ, "tokenizer": NullTokenizer(VOCAB), "num_workers": 0}
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    data = PreTrainingDataModule(paths, **{**defaults, **sizes, **kwargs})
    data.trainer = trainer() if steps is None else steps
    return data


def datasets(data, stage=""):
    data.setup(stage)
    return data._datasets


def first_samples(paths):
    """The tokens of the first samples that are trained on."""
    train = datasets(module(paths, split="1,0,0"), "fit")["train"]
    return [train[i]["tokens"].tolist() for i in range(20)]


def megatron_batch_size(consumed, global_batch_size, rampup):
    """Megatron-LM's batch-size ramp-up, as its num-microbatches calculator writes it."""
    if rampup is None:
        return global_batch_size
    start, increment, samples = rampup
    if consumed > samples:
        return global_batch_size
    return start + int(consumed / (samples / ((global_batch_size - start) // increment))) * increment
