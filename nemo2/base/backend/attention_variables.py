# SPDX-License-Identifier: Apache-2.0
"""The environment variables through which Megatron-Core selects Transformer Engine's attention.

Megatron-Core sets them when a model is built, never resets them, and rejects the next model of the process if it needs
another backend. Transformer Engine reads them in every first call, so they must stay while a model is in use.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_set_for_the_last_model: dict[str, str] = {}


def left_by_a_model(name: str, value: str) -> bool:
    """Whether the last model of this process, and not the user, set a variable to this value."""
    return _set_for_the_last_model.get(name) == value


@contextmanager
def attention_chosen_anew() -> Generator[None, None, None]:
    """A context in which a model may be built with another backend than the last model of this process. If no model is
    built, nothing changes. Variables that the user exported stay."""
    left = {name: os.environ.pop(name) for name in VARIABLES if left_by_a_model(name, os.environ.get(name, ""))}
    free = [name for name in VARIABLES if name not in os.environ]
    try:
        yield
    finally:
        now = {name: os.environ[name] for name in free if name in os.environ}
        if not now:
            os.environ.update(left)
        else:
            _set_for_the_last_model.clear()
            _set_for_the_last_model.update(now)


@contextmanager
def attention_restored() -> Generator[None, None, None]:
    """A context after which the variables are those before it, because no model of it stays in use."""
    before, last = {name: os.environ.get(name) for name in VARIABLES}, dict(_set_for_the_last_model)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _set_for_the_last_model.clear()
        _set_for_the_last_model.update(last)
