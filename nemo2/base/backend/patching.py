# SPDX-License-Identifier: Apache-2.0
"""Replaces attributes of other packages from a table, completely and reversibly.

`from x import y` leaves copies of y in the importing modules, so a replacement of `x.y` alone misses modules that
imported earlier. `Patcher` also rebinds those copies in the modules of the given packages.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nemo2.base.errors import RuntimeFault

_ABSENT: Any = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute to replace.

    target: `"package.module:attribute"`, where attribute may be dotted (`"torch:Tensor.to"`).
    replacement: the new value; with `wraps=True` a function that is called in its place, with the original before the
        arguments.
    why: the problem without the replacement.
    versions: the versions of the target's package for which the patch applies.
    may_be_absent: the attribute is missing in some installations, where it is added.
    """

    target: str
    replacement: Any
    why: str
    wraps: bool = False
    versions: str = ""
    may_be_absent: bool = False

    def resolve(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's own name. Imports the module.

        Raises:
            RuntimeFault: there is no such attribute in the installed version.
        """
        module_name, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            owner = functools.reduce(getattr, parents, importlib.import_module(module_name))
            if not self.may_be_absent:
                getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise RuntimeFault(
                f"nemo2 replaces {self.target} ({self.why}), but the installed version has no such attribute. "
                "Install a version within the range of nemo2's pyproject.toml."
            ) from error
        return owner, name

    def applies_to(self, version: str) -> bool:
        """Whether the patch applies to this version of the target's package. `""` means every version."""
        return Version(version) in SpecifierSet(self.versions, prereleases=True)


class Patcher:
    """Applies patches in order and can take them back in the opposite order."""

    def __init__(self, *, rebind_in: Iterable[str]):
        self._rebind_in = tuple(rebind_in)
        self._undo: list[tuple[Any, str, Any]] = []

    def apply(
        self, patches: Iterable[Patch], *, version: str = "0", choose: Callable[[Any], Any] | None = None
    ) -> None:
        """Apply the patches for `version`, then rebind the copies in already imported modules.

        ``choose(value)`` may return another value for every global of these modules, and for every attribute of their
        classes. One pass does both, because a forked process pays for each page that it reads.
        """
        replaced: dict[int, tuple[Any, Any]] = {}
        for patch in patches:
            if not patch.applies_to(version):
                continue
            owner, name = patch.resolve()
            original = getattr(owner, name, None)
            replacement = _around(original, patch.replacement) if patch.wraps else patch.replacement
            if patch.wraps and isinstance(vars(owner).get(name), staticmethod):
                replacement = staticmethod(replacement)
            self._set(owner, name, replacement)
            # Constants (True, None) are shared by all modules. Only objects with their own identity have copies.
            if callable(original) and replacement is not original:
                replaced[id(original)] = (original, replacement)

        def current(value: Any) -> Any:
            while id(value) in replaced:  # a replacement may have been replaced in turn
                value = replaced[id(value)][1]
            return value if choose is None else choose(value)

        prefixes = tuple(f"{package}." for package in self._rebind_in)
        for module in [module for name, module in list(sys.modules.items()) if module and name.startswith(prefixes)]:
            classes = self._rebind(module, current)
            for defined in classes if choose is not None else ():
                self._rebind(defined, current)

    def undo(self) -> None:
        """Put every original back."""
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _rebind(self, owner: Any, current: Callable[[Any], Any]) -> list[type]:
        """Rebind the attributes of a module or class. Returns the classes that the module defines."""
        values = dict(vars(owner))
        for name, value in values.items():
            if (chosen := current(value)) is not value:
                self._set(owner, name, chosen)
        return [value for value in values.values() if isinstance(value, type) and value.__module__ == owner.__name__]

    def _set(self, owner: Any, name: str, value: Any) -> None:
        # vars() and not getattr(), so that a staticmethod comes back as one.
        self._undo.append((owner, name, vars(owner).get(name, getattr(owner, name, _ABSENT))))
        setattr(owner, name, value)


def _around(original: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    return around
