# SPDX-License-Identifier: Apache-2.0
"""What a task's settings ask for. ``tests/lm_eval`` runs lm-eval itself."""

import pytest

from nemo2.base.errors import ConfigError
from nemo2.llm.evaluation.harness import refuse_counts, temperature_of


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
)
def test_answers_are_drawn_as_the_task_says(settings, temperature):
    assert temperature_of(settings) == temperature


@pytest.mark.parametrize("counts", [{"limit": 0}, {"limit": -3}, {"limit": 0.5}, {"limit": True}, {"num_fewshot": -1}])
def test_numbers_that_lm_eval_takes_in_another_sense_are_refused(counts):
    with pytest.raises(ConfigError, match=next(iter(counts))):
        refuse_counts(**{"limit": None, "num_fewshot": 0} | counts)
    refuse_counts(limit=1, num_fewshot=0)
