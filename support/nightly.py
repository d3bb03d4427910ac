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
    daily = _known(cases := list(cases), daily)
    others = [case for case in cases if case not in daily]
    return [pytest.param(daily, id="daily"), pytest.param(others, id="the others", marks=pytest.mark.nightly)]


def each_case(cases: Iterable[Any], daily: Iterable[Any]) -> list[Any]:
    """A parameter for each of ``cases``, a tuple for several arguments; those that aren't ``daily`` are marked ``nightly``.

    Raises:
        ValueError: a name of ``daily`` isn't one of the cases.
    """
    daily = _known(cases := list(cases), daily)
    marks = {True: (), False: pytest.mark.nightly}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in daily]) for case in cases]


def daily_sample(cases: Iterable[Any]) -> list[Any]:
    """`each_case` of cases that one function makes, as most recipes: every eighth is daily."""
    return each_case(cases := list(cases), cases[::8])


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


def _known(cases: list[Any], daily: Iterable[Any]) -> list[Any]:
    daily = list(daily)
    if unknown := [case for case in daily if case not in cases]:
        raise ValueError(f"daily={unknown}: not one of the cases")
    return daily
