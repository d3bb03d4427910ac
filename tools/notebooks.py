# SPDX-License-Identifier: Apache-2.0
"""``make notebooks``: run the notebooks, each in an empty folder, and keep what they put out.

``python -m tools.notebooks NAME`` runs one.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 600
"""For one cell."""


def executed(path: Path, folder: Path) -> Any:
    """The notebook with its outputs, run in ``folder`` by this interpreter.

    Raises:
        CellExecutionError: a cell failed.
    """
    # A kernel of this very interpreter: the machine may have others under the name in the notebook.
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    own = {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_PREFER_ENV_PATH": "0",
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
        "TMPDIR": str(folder),
        "NEMO_HOME": str(folder / "nemo"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    before = dict(os.environ)
    os.environ.update(own)
    try:
        notebook = nbformat.read(path, as_version=4)
        place = {"metadata": {"path": str(folder)}}
        NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=place, coalesce_streams=True
        ).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return notebook


def without_moments(notebook: Any) -> Any:
    """The notebook without when each cell ran, and without what a cell wrote to standard error."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = without_moments(executed(path, Path(folder)))
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
