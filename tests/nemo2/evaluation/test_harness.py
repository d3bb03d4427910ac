# SPDX-License-Identifier: Apache-2.0
"""What a task's settings ask for. ``tests/lm_eval`` runs lm-eval itself."""

from typing import Any

import pytest

from nemo2.evaluation.harness import temperature_of


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
def test_answers_are_drawn_as_the_task_says(settings: dict[str, Any], temperature: float) -> None:
    assert temperature_of(settings) == temperature
