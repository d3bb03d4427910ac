# SPDX-License-Identifier: Apache-2.0
"""Long lists of cases in two parts: those that differ in kind run every day, and those that repeat them with other numbers run
in `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def daily_and_nightly(cases: Iterable[Any], daily: Iterable[Any]) -> list[Any]:
    """Two parameters of a fixture or a test: the ``daily`` ones of ``cases``, and the others under the marker ``nightly``.

    Raises:
        ValueError: a name of ``daily`` isn't one of the cases.
    """
    cases, daily = list(cases), list(daily)
    if unknown := [case for case in daily if case not in cases]:
        raise ValueError(f"daily={unknown}: not one of the cases")
    others = [case for case in cases if case not in daily]
    return [pytest.param(daily, id="daily"), pytest.param(others, id="the others", marks=pytest.mark.nightly)]
