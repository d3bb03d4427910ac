# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def run(run_on_ranks: Callable[..., list[Any]]) -> Callable[..., Any]:
    """What the first rank returned of a function that all ranks called."""

    def first(function: Callable[..., Any], world: int, *arguments: Any, env: Any = None, **options: Any) -> Any:
        return run_on_ranks(function, world, *arguments, init_process_group=False, quiet=True, env=env, **options)[0]

    return first
