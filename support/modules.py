# SPDX-License-Identifier: Apache-2.0
"""The modules of the package, as tests read them: their files, and what they import."""

import ast
from functools import cache
from pathlib import Path

from nemo2.base.lazy import stub_homes

ROOT = Path(__file__).resolve().parents[1]


@cache
def modules() -> dict[str, Path]:
    """The files of the package, by module name; the links to the two other folders aside."""
    found = {}
    for folder in ("nemo2", "callbacks", "recipes"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents):
                parts = [
                    part for part in file.relative_to(ROOT).with_suffix("").parts if part not in ("nemo2", "__init__")
                ]
                found[".".join(("nemo2", *parts))] = file
    return found


def doors(*folders: str) -> list[str]:
    """The front doors in these folders: packages with a stub."""
    return [
        ".".join(("nemo2", *(part for part in stub.parent.relative_to(ROOT).parts if part != "nemo2")))
        for folder in folders
        for stub in sorted((ROOT / folder).rglob("__init__.pyi"))
        if not any(parent.is_symlink() for parent in stub.parents)
    ]


def imported_by(file: Path) -> set[str]:
    """The modules that a file imports anywhere, through front doors: of a name, the module that it comes from. The stub of a
    front door counts as part of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            found.update(_home(node.module or "", alias.name) for alias in node.names)
    return found | set(_homes(file).values())


def _home(module: str, name: str) -> str:
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    home = _homes(modules()[module]).get(name, module) if module in modules() else module
    return module if home == module else _home(home, name)


@cache
def _homes(file: Path) -> dict[str, str]:
    stub = file.with_suffix(".pyi")
    return stub_homes(stub.read_text()) if stub.exists() else {}
