# SPDX-License-Identifier: Apache-2.0
"""Reads dtypes by name: ``"bf16"``, ``"bfloat16"`` and ``"torch.bfloat16"`` for parameters of type ``torch.dtype``.

Scripts and files name dtypes as text. Text that is not converted would be unequal to the dtype. torch is imported only
when there is text to read.
"""

import functools
import importlib
import re
import typing
from collections.abc import Callable
from typing import Any

from nemo2.base.errors import ConfigError
from nemo2.config.aliases import parameters_of

ShortDtype = typing.Literal["bf16", "fp16", "fp32"]
"""The dtypes of a model's weights, under the names that options have."""
DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}


def named_dtype(name: str) -> Any:
    """The ``torch.dtype`` of this name. None: there is none."""
    torch = importlib.import_module("torch")
    short = name.removeprefix("torch.")
    value = getattr(torch, DTYPE_NAMES.get(short, short), None)
    return value if isinstance(value, torch.dtype) else None


def read_dtype(target: Callable[..., Any], name: str, value: Any) -> Any:
    """``value`` for the parameter ``name`` of ``target``. Text becomes the dtype that it names if the parameter expects
    a dtype.

    Raises:
        ConfigError: the text names no dtype.
    """
    if not isinstance(value, str) or name not in _dtype_parameters(target):
        return value
    dtype = named_dtype(value)
    if dtype is None:
        owner = getattr(target, "__qualname__", str(target))
        raise ConfigError(f"{name}={value!r} of {owner} is not a dtype. Write torch.bfloat16, or 'bf16'.")
    return dtype


@functools.lru_cache(maxsize=1024)
def _dtype_parameters(target: Callable[..., Any]) -> frozenset[str]:
    return frozenset(name for name, parameter in parameters_of(target).items() if _is_dtype(parameter.annotation))


def _is_dtype(annotation: Any) -> bool:
    """Whether an annotation expects a ``torch.dtype`` and does not also accept text."""
    if isinstance(annotation, str):
        return re.fullmatch(r"(Optional\[)?torch\.dtype(\]| \| None)?", annotation) is not None
    choices = typing.get_args(annotation) or (annotation,)
    named = {f"{getattr(choice, '__module__', '')}.{getattr(choice, '__qualname__', '')}" for choice in choices}
    return "torch.dtype" in named and str not in choices
