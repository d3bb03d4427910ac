# SPDX-License-Identifier: Apache-2.0
"""Attributes of live objects: an unknown name raises an error at the line that sets it, whoever sets it.

Without this check, Python would store ``resume.resume_if_exist = True`` on a live object, and nothing would read it.
A class knows the parameters of its constructor, what its body declares (``trainer: Any``) and what the constructor has set.
On models, data modules and trainers, where scripts keep their own state, only names that are almost those of an attribute
are rejected.
"""

import difflib
from collections.abc import Callable
from typing import Any

from nemo2.config.aliases import aliases_of, gone, parameter_names

_GUARD = "__nemo2_guard__"
_KEEP_STATE = {
    ("torch.nn.modules.module", "Module"),
    ("lightning.pytorch.core.datamodule", "LightningDataModule"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
}
_SET_BY_LIGHTNING = {"log", "log_dict"}
"""What its trainer hangs on every callback without declaring it."""
_ALMOST = 0.85
"""The required share of equal letters: one or two letters may differ, not a word."""


def guard(cls: type, *, ready: Callable[[Any], bool], refusal: Callable[[type, str], Exception]) -> None:
    """Make instances of ``cls`` and of its subclasses in nemo2 refuse unknown attributes.

    Args:
        ready: Whether an object's constructor has ended.
        refusal: The error for a class and a name.
    """
    original: Any = cls.__setattr__
    if getattr(original, _GUARD, False):
        return

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name not in self.__dict__ and ready(self) and _means_nothing(self, name):
            raise refusal(type(self), name)
        original(self, name, value)

    setattr(__setattr__, _GUARD, True)
    cls.__setattr__ = __setattr__  # pyright: ignore[reportAttributeAccessIssue]


def _means_nothing(obj: Any, name: str) -> bool:
    cls = type(obj)
    if (
        name.startswith("_")
        or name in _SET_BY_LIGHTNING
        or not cls.__module__.startswith("nemo2.")
        or hasattr(cls, name)
    ):
        return False
    registered = (obj.__dict__.get(kind, ()) for kind in ("_modules", "_parameters", "_buffers"))
    if any(name in names for names in registered) or name in (names_of_class := _known(cls)):
        return False
    keeps_state = any((base.__module__, base.__qualname__) in _KEEP_STATE for base in cls.__mro__)
    if not keeps_state or gone(cls, name) is not None:
        return True
    public = (one for one in obj.__dict__ if not one.startswith("_"))
    return bool(difflib.get_close_matches(name, {*names_of_class, *public}, n=1, cutoff=_ALMOST))


def _known(cls: type) -> set[str]:
    declared = (name for base in cls.__mro__ for name in getattr(base, "__annotations__", {}))
    return {*parameter_names(cls), *aliases_of(cls), *declared}
