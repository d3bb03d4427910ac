# SPDX-License-Identifier: Apache-2.0
"""A global batch of which no token counts is an error that names its samples, and not a loss of 0.0."""

from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from nemo2.base.errors import DataError
from support import small_runs


class Mask(pl.Callback):
    """Empties the masks of all batches from a step on."""

    def __init__(self, first: int, samples: slice) -> None:
        self.first, self.samples = first, samples

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.first:
            batch["loss_mask"][self.samples] = 0


class Cyclic(small_runs.TokenData):
    """Data in an order of its own: the place in training is not the index in the dataset."""

    def train_dataloader(self) -> Any:
        return DataLoader(small_runs.Tokens(self.size), shuffle=True)


def with_empty_masks(**options: Any) -> tuple[str, list[int]]:
    """The message, and the indices of this rank's samples of the step."""
    indices: list[list[int]] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            indices.append(batch["index"].tolist())

    with pytest.raises(DataError) as caught:
        small_runs.fit(
            small_runs.build_llama(), Cyclic(), max_steps=4, callbacks=[Mask(2, slice(None)), Watch()], **options
        )
    return str(caught.value), indices[-1]


def with_fsdp2() -> tuple[str, list[int]]:
    import nemo2 as nl

    return with_empty_masks(strategy=nl.FSDP2Strategy())


def with_one_full_mask() -> bool:
    small_runs.fit(small_runs.build_llama(), max_steps=2, callbacks=[Mask(0, slice(1, None))])
    return True


def test_a_global_batch_without_a_token_to_train_on_names_its_samples(run_on_ranks):
    for ranks in (run_on_ranks(with_empty_masks, 1), run_on_ranks(with_fsdp2, 2)):
        (said, _), indices = ranks[0], sorted(index for _, own in ranks for index in own)
        assert "loss_mask is 0 for all tokens" in said and said.startswith("Step 3,")
        named = said.partition("the samples ")[2].partition(" of the dataset")[0].split(", ")
        assert sorted(map(int, named)) == indices


def with_an_id_outside() -> str:
    class Outside(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batch["tokens"][0, 0] = 10**6

    with pytest.raises(DataError) as caught:
        small_runs.fit(small_runs.build_llama(), max_steps=2, callbacks=[Outside()])
    return str(caught.value)


def test_an_id_outside_the_vocabulary_names_the_samples_of_its_step(run_on_ranks):
    (said,) = run_on_ranks(with_an_id_outside, 1)
    assert (
        said.startswith("Step 1, whose global batch has the samples 0, 1, 2") and "lie outside the vocabulary" in said
    )


def test_samples_without_one_are_no_error_beside_others(run_on_ranks):
    assert run_on_ranks(with_one_full_mask, 1) == [True]
