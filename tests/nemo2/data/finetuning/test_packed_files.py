# SPDX-License-Identifier: Apache-2.0
"""Samples tokenized and packed ahead of training are those that training reads."""

import json

import numpy as np
import pytest

from nemo2.base.errors import ConfigError
from nemo2.data.finetuning.module import FineTuningDataModule
from nemo2.data.finetuning.packed_files import PackedSequenceSpecs, prepare_packed_sequence_data, tokenize_dataset
from nemo2.data.tokenizer import ByteTokenizer
from support.small_chats import make_tokenizer, questions, say, write_lines


@pytest.fixture
def root(tmp_path):
    write_lines(tmp_path / "training.jsonl", questions(20))
    return tmp_path


def test_a_file_is_tokenized_as_in_training(root) -> None:
    samples = tokenize_dataset(root / "training.jsonl", ByteTokenizer(), 48)
    data = FineTuningDataModule(root, seq_length=48, tokenizer=ByteTokenizer())
    stored = data.samples("train")
    assert stored is not None and len(samples) == len(stored) == 20
    for index, sample in enumerate(samples):
        ids, trained = stored.arrays(index)
        assert np.array_equal(sample["input_ids"], ids) and np.array_equal(sample["loss_mask"], trained)


def test_conversations_are_tokenized_too(tmp_path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    write_lines(tmp_path / "chats.jsonl", [say(("user", "hi"), ("assistant", "hello"))])
    (sample,) = tokenize_dataset(tmp_path / "chats.jsonl", tokenizer, 200, dataset_kwargs={"chat": True})
    assert 0 < sample["loss_mask"].sum() < len(sample["input_ids"])


def test_packs_made_ahead_are_those_of_the_run(root, tmp_path) -> None:
    packs, facts = tmp_path / "packs", tmp_path / "packs.json"
    prepare_packed_sequence_data(root / "training.jsonl", packs, facts, 48, ByteTokenizer(), 48, seed=1234)
    made = {file: file.stat().st_mtime_ns for file in packs.rglob("*") if file.is_file()}
    assert made and json.loads(facts.read_text())["packed_sequence_size"] == 48
    specs = PackedSequenceSpecs(48, packed_train_data_path=str(packs))
    data = FineTuningDataModule(
        root, seq_length=48, tokenizer=ByteTokenizer(), micro_batch_size=1, packed_sequence_specs=specs
    )
    data.setup("fit")
    assert {file: file.stat().st_mtime_ns for file in packs.rglob("*") if file.is_file()} == made
    assert not data.pad_cu_seqlens


@pytest.mark.parametrize(("output", "longest"), [("packs", 32), ("packs.npy", 48)])
def test_what_cannot_be_packed_is_refused(root, tmp_path, output, longest) -> None:
    with pytest.raises(ConfigError):
        prepare_packed_sequence_data(root / "training.jsonl", tmp_path / output, None, 48, ByteTokenizer(), longest)
