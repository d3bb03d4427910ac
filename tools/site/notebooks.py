# SPDX-License-Identifier: Apache-2.0
"""The notebooks as pages, with the outputs that they are kept with."""

import functools
from pathlib import Path

from tools.site.pages import ROOT

FOLDER = ROOT / "notebooks"


@functools.cache
def _converted() -> dict[Path, tuple[str, dict[str, bytes]]]:
    import nbformat
    from nbconvert import MarkdownExporter
    from nbconvert.filters import strip_ansi

    converted = {}
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        content = nbformat.read(notebook, as_version=4)
        for output in (one for cell in content.cells for one in cell.get("outputs", []) if "text" in one):
            output.text = strip_ansi(output.text)  # a page has no terminal's colours
        resources = {"output_files_dir": f"{notebook.stem}_files"}
        text, made = MarkdownExporter().from_notebook_node(content, resources=resources)
        converted[notebook] = text, made.get("outputs", {})
    return converted


def pages() -> dict[str, str]:
    """A page's Markdown by its place in the site."""
    return {f"notebooks/{notebook.stem}.md": text for notebook, (text, _) in _converted().items()}


def pictures() -> dict[str, bytes]:
    """The pictures of their outputs by their place in the site."""
    return {f"notebooks/{name}": content for _, pictures in _converted().values() for name, content in pictures.items()}
