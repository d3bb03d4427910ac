# SPDX-License-Identifier: Apache-2.0
"""Random small models under random layouts: the rules refuse what Megatron-Core refuses, and nothing that it builds but what
it builds wrongly. `make sweep` looks at thousands of them."""

from typing import Any

import pytest

from support.nightly import each_case
from tests.long.random_layouts import cases, compare


@pytest.mark.parametrize("count", each_case((12, 300), [12]))
def test_the_rules_refuse_what_megatron_core_refuses_and_nothing_it_builds_right(run_on_ranks: Any, count: int) -> None:
    (found,) = run_on_ranks(compare, 1, cases(count), init_process_group=False, timeout=280)
    assert not found.disagreements, "\n".join(found.disagreements)
    assert found.kinds["legal and built"] >= count // 6 and found.kinds["refused by both"] >= count // 6, found.kinds
    assert found.kinds["proposals built"] >= count // 10, found.kinds
