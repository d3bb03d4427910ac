# SPDX-License-Identifier: Apache-2.0
"""A global batch of which no token counts is an error that names its samples, and not a loss of 0.0."""

from typing import Any

import lightning.pytorch as pl
import pytest

from nemo2.errors import DataError
from support import small_runs


class Mask(pl.Callback):
    """Empties the masks of all batches from a step on."""

    def __init__(self, first: int, samples: slice) -> None:
        self.first, self.samples = first, samples

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.first:
            batch["loss_mask"][self.samples] = 0


def with_empty_masks() -> str:
    with pytest.raises(DataError) as caught:
        small_runs.fit(small_runs.build_llama(), max_steps=4, callbacks=[Mask(2, slice(None))])
    return str(caught.value)


def with_one_full_mask() -> bool:
    small_runs.fit(small_runs.build_llama(), max_steps=2, callbacks=[Mask(0, slice(1, None))])
    return True


def test_a_global_batch_without_a_token_to_train_on_names_its_samples(run_on_ranks):
    said = run_on_ranks(with_empty_masks, 1)[0]
    size = (
        int(said.split("samples ")[1].split(" to ")[1].split(",")[0])
        + 1
        - int(said.split("samples ")[1].split(" to ")[0])
    )
    assert f"samples {2 * size} to {3 * size - 1}," in said and said.startswith("loss_mask is 0 for all tokens")


def test_samples_without_one_are_no_error_beside_others(run_on_ranks):
    assert run_on_ranks(with_one_full_mask, 1) == [True]
