# SPDX-License-Identifier: Apache-2.0
"""A notebook runs from top to bottom; all are kept with what they put out. ``make notebooks`` runs all of them."""

from pathlib import Path

import nbformat
import pytest

from tools import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
PLACES = ("/tmp", "/home/", "/root", str(Path(__file__).resolve().parents[2]))


@pytest.mark.examples
def test_a_notebook_runs(tmp_path: Path) -> None:
    """The others take minutes: they rehearse jobs of 70B, and start commands."""
    done = notebooks.executed(notebooks.FOLDER / "edit_and_train.ipynb", tmp_path)
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run `make notebooks`"
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    assert not any(place in str(outputs) for place in PLACES), "a path of the machine that ran it"
