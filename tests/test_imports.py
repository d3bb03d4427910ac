# SPDX-License-Identifier: Apache-2.0
"""Imports point down, by the table of rooms, and close no circle."""

import ast
from pathlib import Path

import pytest

from tools import rooms


def imported_by(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            modules.add(node.module or "")
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def test_imports_lead_only_where_the_table_of_rooms_lets_them() -> None:
    assert rooms.strays() == [], "mend the import, or the table in tools/rooms.py and run `make fmt`"


def test_rooms_are_listed_from_the_lowest_up() -> None:
    order = [room.name for room in rooms.ROOMS]
    assert [(room.name, other) for room in rooms.ROOMS for other in room.leans_on or () if other not in order] == []
    upward = [(a.name, b) for a in rooms.ROOMS for b in a.leans_on or () if order.index(b) >= order.index(a.name)]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert rooms.circles() == []


def test_every_circle_that_may_stay_is_still_there() -> None:
    known = {(one.importer, one.module) for one in rooms.imports()}
    assert [pair for pair in rooms.BACK if pair not in known] == []


def test_an_import_upward_and_a_circle_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    up = rooms.Import("nemo2.errors", "nemo2.gpus", 7, False)
    monkeypatch.setattr(rooms, "imports", lambda: (up, rooms.Import("nemo2.gpus", "nemo2.errors", 3, False)))
    assert rooms.strays() == ["nemo2.errors:7 imports nemo2.gpus"]
    assert rooms.circles() == [["nemo2.errors", "nemo2.gpus"]]


def test_imports_are_seen_wherever_they_stand() -> None:
    seen = {(one.importer, one.module) for one in rooms.imports()}
    assert ("nemo2", "nemo2.strategy") in seen  # a stub
    assert ("nemo2.recipes._assembler", "nemo2.strategy") in seen  # in a function, through the front door
    assert ("nemo2.recipes._find", "nemo2.recipes._own") in seen  # for types, and in a function


def test_the_page_has_the_table_of_rooms() -> None:
    assert rooms.PAGE.read_text() == rooms.page(), "run `make fmt`"


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    bare = [
        f"{file} imports {module}"
        for file in rooms.modules().values()
        for module in imported_by(file)
        if module.split(".")[0] in ("recipes", "callbacks", "tests", "tools", "support", "bench")
    ]
    assert bare == []


def test_every_file_starts_with_its_licence_and_says_what_it_is_for() -> None:
    for file in rooms.modules().values():
        text = file.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), file
        assert ast.get_docstring(ast.parse(text)), file


@pytest.mark.parametrize(
    ("names", "module"),
    [
        (("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"), "nemo2.ranks"),
        (("_getframe", "currentframe", "f_back", "f_globals", "f_locals"), "nemo2.config.caller"),
    ],
)
def test_one_module_exchanges_objects_between_ranks_and_one_looks_at_frames(
    names: tuple[str, ...], module: str
) -> None:
    users = {
        user
        for user, file in rooms.modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute | ast.alias)
        and (node.attr if isinstance(node, ast.Attribute) else node.name) in names
    }
    assert users == {module}
