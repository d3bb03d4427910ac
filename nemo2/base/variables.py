# SPDX-License-Identifier: Apache-2.0
"""Environment variables and attributes that are set for a while."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which this process has these variables, which child processes inherit. Then it has its own again."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context in which these attributes of ``owner``, an object or a module, have other values."""
    with all_set((owner, name, value) for name, value in attributes.items()):
        yield


@contextlib.contextmanager
def all_set(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """`replaced` for (owner, name, value) of several owners."""
    before = []
    try:
        for owner, name, value in values:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
