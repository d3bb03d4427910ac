# SPDX-License-Identifier: Apache-2.0
"""Functions that Megatron-Core gives to `torch.compile` as it is imported, with and without."""

import sys
from typing import Any


def uncompiled(function: Any) -> Any:
    """The function that was given to `torch.compile`; any other as it is."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def as_megatron_has_it(function: Any) -> Any:
    """The function that now stands where Megatron-Core defines ``function``; a function of another library as it is.

    A class keeps a default as it was imported, compiled. The CPU's backend takes compilation out of modules and classes when it
    is installed: a configuration whose activation was compiled all the same would build C++ for half a minute in each process.
    Megatron-Core also compares a configuration's activation with the functions in its modules.
    """
    plain = uncompiled(function)
    home = getattr(plain, "__module__", None) or ""
    if not home.startswith("megatron."):
        return function
    known = getattr(sys.modules.get(home), getattr(plain, "__name__", ""), None)
    return known if known is not None and uncompiled(known) is plain else function
