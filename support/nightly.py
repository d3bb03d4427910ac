# SPDX-License-Identifier: Apache-2.0
"""Long lists of cases in two parts: those that differ in kind run every day, and those that repeat them with other numbers have
the marker ``nightly`` and run in `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def each_case(cases: Iterable[Any], daily: Iterable[Any] | None = None) -> list[Any]:
    """A parameter for each of ``cases``, a tuple for several arguments; those that aren't ``daily`` run by night.

    Args:
        cases: Values of a parameter.
        daily: Those that run every day. None: every eighth, of cases that one function makes, as most recipes.

    Raises:
        ValueError: a name of ``daily`` isn't one of the cases.
    """
    cases, daily = _known(cases, daily)
    marks = {True: (), False: pytest.mark.nightly}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in daily]) for case in cases]


def daily_and_nightly(cases: Iterable[Any], daily: Iterable[Any] | None = None) -> list[Any]:
    """`each_case` for a test or a fixture that takes many cases at once: two parameters, the daily ones and the others."""
    cases, daily = _known(cases, daily)
    others = [case for case in cases if case not in daily]
    return [pytest.param(daily, id="daily"), pytest.param(others, id="the others", marks=pytest.mark.nightly)]


def requested(request: pytest.FixtureRequest, *arguments: str) -> list[Any]:
    """The values of an argument, or tuples of several, in the tests of this session that use the fixture of ``request``: what it
    has to make."""
    items: Any = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    users = [item.callspec.params for item in items if request.fixturename in item.fixturenames]
    values: list[Any] = []
    for params in users:
        if params.keys() >= {*arguments}:
            value = params[arguments[0]] if len(arguments) == 1 else tuple(params[name] for name in arguments)
            values += [value] if value not in values else []
    return values


def _known(cases: Iterable[Any], daily: Iterable[Any] | None) -> tuple[list[Any], list[Any]]:
    cases = list(cases)
    daily = cases[::8] if daily is None else list(daily)
    if unknown := [case for case in daily if case not in cases]:
        raise ValueError(f"daily={unknown}: not one of the cases")
    return cases, daily
