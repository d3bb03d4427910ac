# SPDX-License-Identifier: Apache-2.0
"""A notebook runs from top to bottom; all are kept with what they put out. ``make notebooks`` runs all of them."""

import ast
from importlib import import_module
from pathlib import Path

import nbformat
import pytest

from tools import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
PLACES = ("/tmp", "/home/", "/root", str(Path(__file__).resolve().parents[2]))


@pytest.mark.examples
def test_a_notebook_runs(tmp_path):
    """The others take minutes: they rehearse jobs of 70B, and start commands."""
    done = notebooks.executed(notebooks.FOLDER / "edit_and_train.ipynb", tmp_path)
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run `make notebooks`"
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    assert not any(place in str(outputs) for place in PLACES), "a path of the machine that ran it"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_nemo2_is_there(path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    code = "\n".join(line for cell in cells for line in cell.splitlines() if not line.startswith("!"))
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, name.name) for node in imports for name in node.names if str(node.module).startswith("nemo2")]
    assert ours and not [(module, name) for module, name in ours if not hasattr(import_module(str(module)), name)]
