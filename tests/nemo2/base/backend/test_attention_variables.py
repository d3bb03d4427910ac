# SPDX-License-Identifier: Apache-2.0
"""Runs of one process may choose different attentions; what a user has exported stays."""

import os
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend

from nemo2.base.backend import attention_variables
from nemo2.base.backend.attention_variables import VARIABLES, attention_chosen_anew, left_by_a_model
from support import small_runs


def runs_of_one_process() -> list[Any]:
    found = []
    for backend in (AttnBackend.flash, AttnBackend.auto, AttnBackend.unfused):
        model = small_runs.build_llama(distributed=True, attention_backend=backend)
        losses = small_runs.fit(model, max_steps=1)["losses"]
        small_runs.release()
        found.append((losses, "".join(os.environ[name] for name in VARIABLES)))
    return found


def test_runs_of_one_process_choose_anew(run_on_ranks: Any) -> None:
    (first, flash), (second, auto), (third, unfused) = run_on_ranks(runs_of_one_process, 1)[0]
    assert (flash, auto, unfused) == ("100", "111", "001")
    assert first == second == third


def test_a_users_variable_stays_and_a_model_that_is_there_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_variables, "_set_for_the_last_model", {})
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # deleting what isn't there would not be undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with attention_chosen_anew():  # as Megatron-Core does
        os.environ |= {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    assert left_by_a_model("NVTE_FLASH_ATTN", "1") and not left_by_a_model("NVTE_FUSED_ATTN", "0")
    with attention_chosen_anew():
        assert [os.environ.get(name) for name in VARIABLES] == [None, "0", None]
    assert [os.environ.get(name) for name in VARIABLES] == ["1", "0", "0"]  # none was built
