# SPDX-License-Identifier: Apache-2.0
"""Attributes of live objects: an unknown name raises an error at the line of the script that sets it.

Without this check, Python would store ``resume.resume_if_exist = True`` on a live object, and nothing would read it.
Attributes set by libraries, nemo2 and the object's own methods are accepted. On models, data modules and trainers,
where scripts keep their own state, only names that are almost those of an attribute are rejected.
"""

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from nemo2.config.aliases import aliases_of, gone, parameter_names

_GUARD = "__nemo2_guard__"
_KEEP_STATE = {
    ("torch.nn.modules.module", "Module"),
    ("lightning.pytorch.core.datamodule", "LightningDataModule"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
}
_ALMOST = 0.85
"""The required share of equal letters: one or two letters may differ, not a word."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


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
        unknown = name not in self.__dict__ and _means_nothing(self, name)
        if unknown and ready(self) and _of_a_script(sys._getframe(1), self):
            raise refusal(type(self), name)
        original(self, name, value)

    setattr(__setattr__, _GUARD, True)
    cls.__setattr__ = __setattr__  # pyright: ignore[reportAttributeAccessIssue]


def _means_nothing(obj: Any, name: str) -> bool:
    cls = type(obj)
    if name.startswith("_") or not cls.__module__.startswith("nemo2.") or hasattr(cls, name):
        return False
    registered = (obj.__dict__.get(kind, ()) for kind in ("_modules", "_parameters", "_buffers"))
    if any(name in names for names in registered) or name in (known := _known(cls)):
        return False
    keeps_state = any((base.__module__, base.__qualname__) in _KEEP_STATE for base in cls.__mro__)
    if not keeps_state or gone(cls, name) is not None:
        return True
    return bool(difflib.get_close_matches(name, {*known, *_public(obj.__dict__)}, n=1, cutoff=_ALMOST))


def _known(cls: type) -> set[str]:
    declared = (name for base in cls.__mro__ for name in getattr(base, "__annotations__", {}))
    return {*parameter_names(cls), *aliases_of(cls), *declared}


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def _of_a_script(frame: FrameType, obj: Any) -> bool:
    """Whether this line belongs to the user's script: not to a library, nemo2 or a method of the object."""
    code, file = frame.f_code, frame.f_code.co_filename
    if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "nemo2":
        return False
    if (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith((_STANDARD_LIBRARY, "<frozen", "<string>"))
    ):
        return False
    return not (code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is obj)
