# SPDX-License-Identifier: Apache-2.0
"""MkDocs' hooks (mkdocs.yml): pages that are generated, and pages of the repository as the site shows them."""

import functools
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site import notebooks, reference
from tools.site.pages import ROOT, SITE_PAGES, as_site_page, linked_files, source_page

LOOKED_UP = {"Reference": 0.2, "How it is built": 0.1}
"""Sections whose pages a search ranks below those that explain, by the factor of their scores."""
_CELL, _CODE = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL), re.compile(r"<code>[^<]+</code>")
_LONG_NAME = re.compile(r"[\w.=(/]{28,}")


@functools.cache
def _generated() -> dict[str, str]:
    """Every page that isn't a file of docs/, by its place in the site. They stay the same while ``mkdocs serve`` runs."""
    pages = {**notebooks.pages(), **reference.pages()}
    docs = {page.relative_to(ROOT / "docs").as_posix(): page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    for path in linked_files({**pages, **docs}):
        pages[SITE_PAGES[path]] = source_page(path)
    return pages


def on_files(files: Files, config: Any) -> Files:
    for place, content in _generated().items():
        files.append(File.generated(config, place, content=content))
    for place, content in notebooks.pictures().items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    return as_site_page(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    section = page.ancestors[-1].title if page.ancestors else ""
    if Path(page.file.src_uri).parts[0] == "source":
        # Files that are shown are no answers to a search: what describes them is.
        page.meta.update(search={"exclude": True}, hide=["toc"])
    elif section in LOOKED_UP:
        page.meta["search"] = {"boost": LOOKED_UP[section]}
    # In a table, long names may go on below: a browser breaks them nowhere by itself, and a column would leave the page.
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _LONG_NAME.sub(_breakable, code[0]), cell[0]), html)


def _breakable(name: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)[_.=(/](?=\w)", r"\g<0><wbr>", name[0])
