# SPDX-License-Identifier: Apache-2.0
"""Sets the version of Transformer Engine that Megatron-Core's configurations find when they are made.

They compare versions with this process's version, and have no argument for another one. Without the package a
comparison is a TypeError before 0.19. A question about another machine needs that machine's version, so this module
replaces the result of Megatron-Core's own probe while a configuration is made. No other module does so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

from megatron.core import utils as megatron_utils
from packaging.version import Version

from nemo2.base.backend.extras import has


@contextmanager
def megatron_finds(version: Optional[str]) -> Iterator[None]:
    """A context in which configurations find Transformer Engine of this version. This process's own package takes
    precedence. None keeps the result of the probe."""
    before = megatron_utils._te_version
    if version is not None and not has("transformer_engine"):
        megatron_utils._te_version = Version(version)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        megatron_utils._te_version = before
