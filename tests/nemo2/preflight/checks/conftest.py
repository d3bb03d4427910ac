# SPDX-License-Identifier: Apache-2.0
"""The rules are tested as on a machine without optional packages; each example is looked at once."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without optional packages, whatever this one has."""
    from nemo2.base.backend import extras
    from nemo2.preflight.checks.rules import parts

    optional = ("transformer_engine", "wandb", "mamba_ssm", "causal_conv1d")
    find = extras.has
    for module in (extras, parts):
        monkeypatch.setattr(module, "has", lambda name: name not in optional and find(name))
    monkeypatch.setattr(extras, "have_te", lambda: False)


@pytest.fixture(scope="session")
def problems_once() -> Callable[[Any], list[Any]]:
    """`problems_of`, remembered: the page needs what the rules' own tests need."""
    from support.rule_cases import problems_of

    seen: dict[str, list[Any]] = {}

    def problems(case: Any) -> list[Any]:
        if repr(case) not in seen:
            seen[repr(case)] = problems_of(case)
        return seen[repr(case)]

    return problems
