# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: the environment, other libraries' warnings, and functions run on gloo ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from support import ranks

ranks.prepare()  # before anything imports torch

# By message or by module, never by category alone: ours must stay errors.
OTHER_LIBRARIES_WARNINGS = (
    "ignore:.*Falling back to (Torch|local).*:UserWarning",
    "ignore:Apex is not installed:UserWarning",
    "ignore:full scope is deprecated:UserWarning",
    "ignore:.*flash.attn.*not installed:UserWarning",
    "ignore::DeprecationWarning:megatron",
    "ignore::FutureWarning:megatron",
    "ignore::SyntaxWarning:megatron",
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore::DeprecationWarning:lightning",
    "ignore::DeprecationWarning:leptonai",
    "ignore::DeprecationWarning:pydantic",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in OTHER_LIBRARIES_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def run_on_ranks() -> Callable[..., list[Any]]:
    """`support.ranks.run`: ``run_on_ranks(function, world, *args, timeout=180, env=None, **kwargs)``."""
    return ranks.run
