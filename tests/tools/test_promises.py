# SPDX-License-Identifier: Apache-2.0
"""docs/promises.md: no option without a row, no row without a test that exists."""

import ast
from functools import cache

import pytest

from tools import promises

ROWS = [(section.title, promise, test) for section in promises.SECTIONS for promise, test in promises.rows(section)]


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((promises.ROOT / "tests" / path).read_text())
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef))


def test_the_page_is_written_from_the_rows() -> None:
    assert promises.PAGE.read_text() == promises.page(), "run make fmt"


CALLS = [(call, tests) for section in promises.SECTIONS for call, tests in section.calls.items()]
each_call = pytest.mark.parametrize(("call", "tests"), CALLS, ids=[call for call, _ in CALLS])


@each_call
def test_every_option_of_the_code_has_a_row_and_no_other(call: str, tests: dict[str, str]) -> None:
    assert set(tests) == set(promises.signature_of(call))


def test_every_row_names_a_test_that_exists() -> None:
    missing = [
        (promise, test) for _, promise, test in ROWS if test.split("::")[1] not in _tests_of(test.split("::")[0])
    ]
    assert missing == [] and len(ROWS) > 100


@each_call
def test_the_file_of_an_options_test_knows_the_option(call: str, tests: dict[str, str]) -> None:
    for option, test in tests.items():
        assert option in (promises.ROOT / "tests" / test.split("::")[0]).read_text(), option


def test_no_promise_is_made_twice() -> None:
    told = [promise for _, promise, _ in ROWS]
    assert len(set(told)) == len(told)
