# SPDX-License-Identifier: Apache-2.0
"""The version of Transformer Engine that Megatron-Core's configurations find when they are made.

They compare versions with that of this process, and know no argument for another one: without the package, a comparison is a
TypeError before 0.19. A question about another machine needs that machine's version, so what Megatron-Core keeps of its own
probe is replaced while a configuration is made. This is the only place that does so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

from megatron.core import utils as megatron_utils
from packaging.version import Version

from nemo2.backend.extras import has


@contextmanager
def megatron_finds(version: Optional[str]) -> Iterator[None]:
    """Inside, configurations find Transformer Engine of this version. The package of this process goes first, and None leaves
    what is found to it."""
    before = megatron_utils._te_version
    if version is not None and not has("transformer_engine"):
        megatron_utils._te_version = Version(version)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        megatron_utils._te_version = before
