# SPDX-License-Identifier: Apache-2.0
"""Pages as GitHub shows them, made pages of the site: their links lead there, and lists begin where GitHub sees them begin.

A link to a file outside of docs/ leads to a page that shows the file.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = "index.md"
FOLDERS = {
    "recipes": "reference/recipes.md",
    "callbacks": "reference/callbacks.md",
    "nemo2": "architecture.md",
    "tests": "contributing.md",
    "bench": "measuring.md",
    "docs": HOME,
    "notebooks": "notebooks/edit_and_train.md",
}
"""The target of links to folders of the repository."""

_LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".yaml": "yaml"}
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#:]+)(?P<rest>(?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^\s*(```|~~~)")
_ITEM = re.compile(r"^(?P<indent> *)(?:[-*+]|\d+[.)]) +\S")


class _SitePages(dict[str, str]):
    """Where a file of the repository is shown: its path in the repository to its page's place in the site."""

    def __missing__(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if path == "README.md":
            return HOME
        if folder == "notebooks":
            return f"notebooks/{Path(name).with_suffix('.md')}"
        return f"source/{path.removesuffix('.md')}.md"


SITE_PAGES = _SitePages()


def source_of(place: str) -> str:
    """The path in the repository of what is shown at a place in the site, which its relative links start from."""
    if place.startswith("source/"):
        return place.removeprefix("source/")
    if place.startswith("notebooks/"):
        return place
    return f"docs/{place}"


def linked_files(pages: Mapping[str, str]) -> list[str]:
    """The repository's files outside of docs/ that pages link to, and those that linked Markdown files link to."""
    found: dict[str, None] = {}
    open_pages = [(source_of(place), text) for place, text in pages.items()]
    while open_pages:
        source, text = open_pages.pop()
        for match in _LINK.finditer(_without_code(text)):
            path = _target(match["target"], source)
            if path in found or SITE_PAGES[path].partition("/")[0] != "source" or not (ROOT / path).is_file():
                continue
            found[path] = None
            if path.endswith(".md"):
                open_pages.append((path, (ROOT / path).read_text()))
    return list(found)


def source_page(path: str) -> str:
    """The page that shows a file: Markdown as it is, anything else as code."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# `{path}`\n\n````{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def as_site_page(markdown: str, place: str) -> str:
    """A page's Markdown with the site's links, for MkDocs' dialect."""
    source, lines = source_of(place), []
    fenced = False
    for line in markdown.splitlines():
        fence = bool(_FENCE.match(line))
        if not fenced and not fence:
            if line.startswith("<!--") and line.endswith("-->"):
                continue
            line = _LINK.sub(lambda match: _site_link(match, source, place), line)
            item = _ITEM.match(line)
            if item and lines and lines[-1].strip() and not _inside_a_list(lines):
                lines.append("")
        fenced ^= fence
        lines.append(line)
    return "\n".join(_indented(lines)) + "\n"


def _site_link(match: re.Match[str], source: str, place: str) -> str:
    path = _target(match["target"], source)
    if (folder := FOLDERS.get(path)) is not None:
        there = folder
    elif (ROOT / path).is_file() or path.startswith("docs/"):
        there = SITE_PAGES[path]
    else:
        return match[0]
    return match["before"] + posixpath.relpath(there, posixpath.dirname(place) or ".") + match["rest"]


def _target(target: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _inside_a_list(lines: list[str]) -> bool:
    """Whether the paragraph that these lines end with belongs to an item."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line):
            return True
    return False


def _indented(lines: list[str]) -> list[str]:
    """The lines with what belongs to an item four columns in, where GitHub takes two or three."""
    shown, stack, fenced = [], [], False
    for line in lines:
        fence = bool(_FENCE.match(line))
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        if not text:
            shown.append("")
            continue
        if not fenced:
            while stack and indent < stack[-1]:
                stack.pop()
        depth = len(stack)
        outer = stack[-1] if stack else 0
        shown.append(" " * (4 * depth + max(0, indent - outer)) + text if depth else line)
        if not fenced and not fence and (item := _ITEM.match(line)):
            stack.append(len(item[0]) - 1)
        fenced ^= fence
    return shown
