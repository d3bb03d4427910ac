# SPDX-License-Identifier: Apache-2.0
"""Which samples share a row, and the rows as tensors."""

import numpy as np
import pytest

from nemo2.base.errors import ConfigError, DataError
from nemo2.config import notices
from nemo2.data.finetuning.packing import Fullness, PackedSequenceSpecs, pack
from nemo2.data.finetuning.rows import Collate, row_of


def answers(size: int, seed: int = 0) -> np.ndarray:
    """Lengths as instruction sets have them: most are short, a few as long as a row."""
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(5.3, 0.9, size).astype(int), 8, 2048)


def test_every_sample_is_in_one_row_and_no_row_is_too_long():
    lengths = answers(500)
    for align in (1, 4, 16):
        rows = pack(lengths, 2048, align=align)
        assert sorted(index for row in rows for index in row) == list(range(500))
        assert all(sum(-(-lengths[index] // align) * align for index in row) <= 2048 for row in rows)


def test_rows_are_as_few_as_best_fit_decreasing_promises():
    lengths = answers(3000)
    rows = pack(lengths, 2048)
    assert len(rows) <= np.ceil(lengths.sum() / 2048) * 11 / 9 + 1
    assert pack([6, 6, 4, 4, 5, 5], 10) and len(pack([6, 6, 4, 4, 5, 5], 10)) == 3


def test_the_seed_decides_and_rows_are_not_in_the_order_of_their_lengths():
    lengths = answers(400)
    first, again, other = (pack(lengths, 2048, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    longest = [max(lengths[index] for index in row) for row in first]
    assert longest != sorted(longest, reverse=True)


def test_a_sample_that_fits_no_row_is_an_error():
    with pytest.raises(DataError, match="Sample 1 has 12 tokens, but a row holds only 10"):
        pack([3, 11], 10, align=4)


def test_padding_before_and_after_on_lengths_as_they_are():
    lengths = answers(2000)
    fullness = Fullness.of(lengths, pack(lengths, 2048), 2048)
    assert fullness.padding < 0.01 and fullness.padding_unpacked > 0.8
    tokens = int(lengths.sum())
    assert fullness.padding == pytest.approx(1 - tokens / (fullness.rows * 2048))
    assert "2,000 samples in" in str(fullness) and "padding is" in str(fullness)


def test_a_row_holds_its_samples_with_positions_that_begin_anew():
    arrays = [(np.array([5, 6, 7]), np.array([0, 0, 1], bool)), (np.array([8, 9]), np.array([1, 1], bool))]
    row = {name: value.tolist() for name, value in row_of(arrays, align=4, pad_id=99, packed=True).items()}
    assert row["tokens"] == [5, 6, 99, 99, 8, 99, 99, 99]
    assert row["labels"] == [6, 7, 99, 99, 9, 99, 99, 99]
    assert row["loss_mask"] == [0, 1, 0, 0, 1, 0, 0, 0]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert row["cu_seqlens"] == [0, 4, 8]


def test_a_batch_pads_to_one_length_and_its_padding_is_not_trained_on():
    one = row_of([(np.arange(6), np.ones(6, bool))], packed=True)
    two = row_of([(np.arange(3), np.ones(3, bool))] * 2, packed=True)
    batch = Collate(pad_id=7, multiple=4)([one, two])
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4, 7, 7, 7], [0, 1, 0, 1, 7, 7, 7, 7]]
    assert batch["loss_mask"].sum(dim=1).tolist() == [5, 4]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 0, 1, 2, 3]]
    assert batch["cu_seqlens"].tolist() == [[0, 5, -1], [0, 2, 4]]
    assert Collate(pad_id=7, length=9, most_ends=5)([one])["cu_seqlens"].shape == (1, 5)
    assert Collate(pad_id=7, multiple=4, at_most=6)([one])["tokens"].shape == (1, 6)


def test_specs_that_cannot_be_meant():
    assert not PackedSequenceSpecs().active and PackedSequenceSpecs(packed_sequence_size=8).active
    with pytest.raises(ConfigError, match="packed_sequence_size=0.5: must be a number of tokens"):
        PackedSequenceSpecs(packed_sequence_size=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="NeMo's packed files are pickles"):
        PackedSequenceSpecs(packed_sequence_size=8, packed_train_data_path="packed_2048.npy")


def test_settings_of_packs_that_are_not_made_are_told(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_announced", set())
    PackedSequenceSpecs(packed_train_data_path="packs", pad_cu_seqlens=True)
    assert "packed_train_data_path='packs' has no effect" in caplog.text and "pad_cu_seqlens=True" in caplog.text
    caplog.clear()
    PackedSequenceSpecs(128, packed_train_data_path="other", pad_cu_seqlens=True)
    assert not caplog.text
