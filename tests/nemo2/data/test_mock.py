# SPDX-License-Identifier: Apache-2.0
"""MockDataModule: shapes, determinism, and no need of anything."""

import socket
from types import SimpleNamespace

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.config.tree import as_config
from nemo2.data.mock import MockDataModule
from nemo2.data.tokenizer import NullTokenizer


def make(**kwargs):
    return MockDataModule(**{"seq_length": 16, "tokenizer": NullTokenizer(100), "num_workers": 0, **kwargs})


def test_an_item_has_tokens_labels_mask_and_positions():
    data = make()
    data.setup()
    item = data.train_dataloader().dataset[0]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in item.items()} == {
        "tokens": (torch.int64, (16,)),
        "labels": (torch.int64, (16,)),
        "loss_mask": (torch.float32, (16,)),
        "position_ids": (torch.int64, (16,)),
    }
    assert torch.equal(item["tokens"][1:], item["labels"][:-1])
    assert item["loss_mask"].sum() == 16
    assert torch.equal(item["position_ids"], torch.arange(16))


def test_the_mask_forbids_the_future():
    data = make(create_attention_mask=True)
    mask = data.train_dataloader().dataset[0]["attention_mask"]
    assert mask.shape == (1, 16, 16)
    assert all(bool(mask[0, i, j]) == (j > i) for i in range(16) for j in range(16))


def test_samples_depend_on_seed_split_and_index_only():
    def sample(index=3, split="train", **kwargs):
        data = make(**kwargs)
        loader = data.train_dataloader() if split == "train" else data.val_dataloader()
        return loader.dataset[index]["tokens"].tolist()

    assert sample() == sample(num_train_samples=50, global_batch_size=16)
    assert len({tuple(s) for s in (sample(), sample(index=4), sample(split="validation"), sample(seed=1))}) == 4


def test_all_ids_are_within_the_vocabulary_and_all_occur_and_no_network_is_needed(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", None)  # it would fail if it were called
    dataset = make().train_dataloader().dataset
    seen = torch.cat([dataset[i]["tokens"] for i in range(100)]).unique()
    assert seen.tolist() == list(range(100))
    data = MockDataModule(seq_length=8, num_workers=0)
    assert data.tokenizer.vocab_size == 50257
    assert data.train_dataloader().dataset[0]["tokens"].max() < 50257


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"seq_length": 0}, "seq_length=0: must be a whole number of at least 1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"vocab_file": "x"}, "give both or neither"),
        ({"vocab_file": "x", "merges_file": "y"}, "both name a vocabulary"),
    ],
)
def test_wrong_settings_are_refused_in_words(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        make(**kwargs)


def test_a_fit_without_training_samples_is_refused():
    """Lightning would end it before its first step, as if it had succeeded."""
    data = make(num_train_samples=0)
    with pytest.raises(ConfigError, match="num_train_samples=0 leaves no samples") as caught:
        data.train_dataloader()
    assert caught.value.rule == "splits-have-data"
    assert make(num_val_samples=0).val_dataloader() == []


def test_a_limit_of_validation_batches_without_validation_samples_has_no_effect_in_words(caplog):
    data = make(num_val_samples=0)
    data.trainer = SimpleNamespace(limit_val_batches=7)
    assert data.val_dataloader() == []
    assert "trainer.limit_val_batches=7 has no effect. data.num_val_samples=0 leaves no samples" in caplog.text


def test_an_attribute_that_was_set_on_a_live_module_is_part_of_its_config():
    data = make()
    data.global_batch_size, data.num_train_samples = 32, 5
    config = as_config(data)
    assert (config.seq_length, config.global_batch_size, config.num_train_samples) == (16, 32, 5)
