# SPDX-License-Identifier: Apache-2.0
"""Tables of text: aligned, and every cell whole, whatever the width."""

import pytest

from nemo2.base.columns import columns, folded

ROWS = [
    ("sizes-are-counts", 1, "Every parallel size is a whole number of at least 1."),
    ("something-to-shard", 22, "Megatron-FSDP (`strategy.fsdp`) has two ranks or more to shard over."),
]
HEAD = ("name", "number", "says")


def test_into_a_pipe_a_row_is_one_line_however_long() -> None:
    head, *lines = columns([*ROWS, ("x", 3, "y" * 5000)], head=HEAD, right=[1])
    assert head.split() == [*HEAD]
    assert [line.index(str(row[1])) + len(str(row[1])) for line, row in zip(lines, ROWS, strict=False)] == [26, 26]
    assert [line.split("  ")[0] for line in lines] == [*(row[0] for row in ROWS), "x"]
    assert lines[2].endswith("y" * 5000)


@pytest.mark.parametrize("width", range(22, 110, 4))
def test_no_width_loses_a_word(width: int) -> None:
    lines = columns(ROWS, head=HEAD, right=[1], width=width, indent=2)
    assert all(line.startswith("  ") for line in lines)
    assert sorted(" ".join(lines).split()) == sorted(
        word for row in (HEAD, *ROWS) for cell in row for word in str(cell).split()
    )
    if width >= 60:  # room for the two others and 20 characters
        assert all(len(line) <= width for line in lines)


def test_only_the_column_that_folds_is_folded_where_that_helps() -> None:
    lines = columns(ROWS, width=60)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [row[0] for row in ROWS]
    lines = columns([("a name of its own", "w " * 30, "last")], folds=1, width=50)
    assert lines[0].startswith("a name of its own  w w") and lines[0].endswith("last") and len(lines) > 1


def test_tables_below_each_other_share_a_width_and_cells_keep_their_line_breaks() -> None:
    first, second = (columns([("ok", name, "1\n2")], least=10) for name in ("a", "b" * 10))
    assert first == ["ok  a           1", " " * 16 + "2"]
    assert second == ["ok  bbbbbbbbbb  1", " " * 16 + "2"]


def test_styles_are_escape_sequences_where_colours_are_wanted_and_markup_is_text() -> None:
    cell = ("[red]ok[/red]", "green")
    assert columns([(cell, "x")], colours=True) == ["\033[32m[red]ok[/red]\033[0m  x"]
    assert columns([(cell, "x")]) == ["[red]ok[/red]  x"]


def test_no_rows_are_no_lines_but_the_head() -> None:
    assert columns([]) == []
    assert columns([], head=HEAD) == ["name  number  says"]


def test_in_a_notebook_a_table_is_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", kernel, raising=False)
    shown: list[object] = []
    monkeypatch.setattr("rich.jupyter.display", lambda *what: shown.append(what))
    assert columns([("a", 1)]) == ["a  1"] and shown == []


def test_control_characters_of_a_file_reach_no_terminal():
    lines = columns([("run", "a\x1b]0;title\x07\x9b2Jb\u202ec"), ("next", ("\x1b[31mred", "bold"))])
    assert lines == ["run   a\\x1b]0;title\\x07\\x9b2Jb\\u202ec", "next  \\x1b[31mred"]


def test_a_sentence_is_folded_at_the_terminals_width_and_at_120_columns_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = (
        "  parameters  3.67M with a vocabulary of 2,048; 524k in adapters and 524k in modules_to_save train (28.55%)"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    assert folded(sentence) == sentence
    assert [len(line) <= 120 for line in folded(f"{sentence} {sentence}").splitlines()] == [True, True]
    monkeypatch.setenv("COLUMNS", "80")
    first, second = folded(sentence, indent=14).splitlines()
    assert len(first) <= 80 and second.startswith(" " * 14) and f"{first} {second.strip()}" == sentence
