# SPDX-License-Identifier: Apache-2.0
"""The site's navigation and the README's table of documentation have the same sections and pages, in the same order."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_BY_THE_SITE = "reference/"
HOME = "docs/index.md"
"""The site's own first page, in place of the README."""


def sections_of_the_site() -> dict[str, list[str]]:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: _files(entries) for section in sections for title, entries in section.items()}


def _files(entries: list[str | dict[str, str]]) -> list[str]:
    pages = [page for entry in entries for page in ([entry] if isinstance(entry, str) else entry.values())]
    return [_file(page) for page in pages if not page.startswith(WRITTEN_BY_THE_SITE)]


def _file(page: str) -> str:
    return page.replace(".md", ".ipynb") if page.startswith("notebooks/") else f"docs/{page}"


def sections_of_the_readme() -> dict[str, list[str]]:
    _, _, text = (ROOT / "README.md").read_text().partition("| section | pages |\n|---|---|\n")
    rows = [line.split("|")[1:3] for line in text.partition("\n\n")[0].splitlines()]
    return {title.strip(): re.findall(r"\]\((.+?)\)", pages) for title, pages in rows}


def test_the_readme_lists_the_pages_of_the_navigation():
    site = sections_of_the_site()
    assert site["Start here"].pop(0) == HOME
    assert list(sections_of_the_readme().items()) == list(site.items())


def test_every_page_is_in_the_navigation_once():
    listed = [page for pages in sections_of_the_site().values() for page in pages]
    there = [str(file.relative_to(ROOT)) for file in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]]
    assert sorted(listed) == sorted(there)
