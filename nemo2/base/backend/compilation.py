# SPDX-License-Identifier: Apache-2.0
"""Functions that Megatron-Core compiles with `torch.compile` on import, in compiled and original form."""

import sys
from typing import Any


def uncompiled(function: Any) -> Any:
    """The original of a function compiled with `torch.compile`. Any other function is returned unchanged."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def as_megatron_has_it(function: Any) -> Any:
    """The function that currently has the name of ``function`` in Megatron-Core. A function of another library is
    returned unchanged.

    A class keeps its defaults as imported, that is compiled. The CPU's backend removes compilation from modules and
    classes when it is installed. A configuration whose activation was still compiled would build C++ for half a minute
    in each process. Megatron-Core also compares a configuration's activation with the functions in its modules.
    """
    plain = uncompiled(function)
    home = getattr(plain, "__module__", None) or ""
    if not home.startswith("megatron."):
        return function
    current = getattr(sys.modules.get(home), getattr(plain, "__name__", ""), None)
    return current if current is not None and uncompiled(current) is plain else function
