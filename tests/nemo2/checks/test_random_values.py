# SPDX-License-Identifier: Apache-2.0
"""Random recipes with values at the edges of what their fields may have: what `check` calls legal trains, and what it refuses for
Megatron-Core's sake doesn't. `python -m tools.rules.edges` looks at thousands of them."""

from concurrent.futures import ThreadPoolExecutor

from tools.rules.edges import Found, drawn, judge

CASES = 24


def test_what_is_legal_trains_two_steps_and_what_is_refused_does_not() -> None:
    found, made = Found(), drawn(CASES)
    with ThreadPoolExecutor(2) as pool:
        for one, answer in zip(made, pool.map(judge, made), strict=True):
            found.add(one, *answer)
    assert not found.disagreements, "\n".join(found.disagreements)
    assert found.kinds["legal, and ran"] >= 5 and found.kinds["refused, and fails"] >= 3, found.kinds
