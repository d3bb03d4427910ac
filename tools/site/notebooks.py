# SPDX-License-Identifier: Apache-2.0
"""The notebooks as pages, with the outputs that they are kept with."""

import functools
from pathlib import Path

from tools.site.pages import ROOT

FOLDER = ROOT / "notebooks"


@functools.cache
def _converted() -> dict[Path, tuple[str, dict[str, bytes]]]:
    from nbconvert import MarkdownExporter

    converted = {}
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        resources = {"output_files_dir": f"{notebook.stem}_files"}
        text, made = MarkdownExporter().from_filename(str(notebook), resources=resources)
        converted[notebook] = text, made.get("outputs", {})
    return converted


def pages() -> dict[str, str]:
    """A page's Markdown by its place in the site."""
    return {f"notebooks/{notebook.stem}.md": text for notebook, (text, _) in _converted().items()}


def pictures() -> dict[str, bytes]:
    """The pictures of their outputs by their place in the site."""
    return {f"notebooks/{name}": content for _, pictures in _converted().values() for name, content in pictures.items()}
