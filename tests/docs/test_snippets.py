# SPDX-License-Identifier: Apache-2.0
"""Every example of the README and of docs/ runs, as it is written there."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.wrapped import COLUMNS

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("snippets.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("docs_snippets", SERVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


snippets = _load()
WITH_EXAMPLES = [page for page in PAGES if any(block.runs for block in snippets.blocks_of(page))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    home = tmp_path_factory.mktemp("home")
    environment = {
        **os.environ,
        "COLUMNS": "80",  # the pages show what a terminal of this width shows
        # A user's commands are those of the environment that runs the tests.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "NEMORUN_HOME": str(home / "nemo_run"),
        "NEMO_HOME": str(home / "nemo"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=30)


@pytest.fixture(scope="module")
def run_page(server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """Runs a page once, in the folder of the page that it continues; returns its folder and its failure, None if it has none."""

    @functools.cache
    def run(page: Path) -> tuple[Path, str | None]:
        assert server.stdin is not None and server.stdout is not None
        before = snippets.page_before(page)
        folder, failure = (tmp_path_factory.mktemp(page.stem), None) if before is None else run(before)
        if failure is not None:
            return folder, failure
        blocks = [block for block in snippets.blocks_of(page) if block.runs]
        server.stdin.write(snippets.request(folder, blocks))
        server.stdin.flush()
        return folder, json.loads(server.stdout.readline())

    return run


@pytest.mark.examples
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page, run_page):
    _, failure = run_page(page)
    assert failure is None, failure


def test_only_known_notes_are_used_and_a_skipped_example_says_why():
    for block in (block for page in PAGES for block in snippets.blocks_of(page)):
        known = re.fullmatch(r"skip, \S.{15,}|file \S+|with \S.*|exits [1-9]\d*|prints|", block.on_slurm().note)
        assert known, f"{block.page}:{block.line}: <!-- test: {block.note} -->"


def test_the_lines_of_examples_fit_the_column_of_the_site():
    wide = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        inside = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            fence = line.lstrip().startswith("```")
            inside ^= fence
            wide += [f"{page.name}:{number}"] if inside and not fence and len(line) > COLUMNS else []
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        lines = [line.rstrip("\n") for cell in cells for line in cell["source"]]
        wide += [f"{notebook.name}: {line}" for line in lines if len(line) > COLUMNS]
    assert wide == []


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_failing_example_is_told_by_its_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\nraise ValueError(x)\n```\n")
    failure = snippets.run_page(snippets.blocks_of(page))
    assert "page.md:4" in failure and 'page.md", line 5' in failure and "ValueError: 1" in failure


def test_an_example_that_must_fail_fails_the_page_where_it_does_not(tmp_path):
    for exits, told in (("exit 3", None), ("exit 4", "exit code 4"), ("true", "exit code 0")):
        page = tmp_path / "page.md"
        page.write_text(f"<!-- test: exits 3 -->\n```bash\n{exits}\n```\n")
        failure = snippets.run_page(snippets.blocks_of(page))
        assert failure is None if told is None else told in failure


def test_output_that_was_not_printed_is_found():
    assert snippets.not_printed("a\n...\nb is ... long\n", "a\nx\nb is 3 s long\n") is None
    assert snippets.not_printed("b\na\n", "a\nb\n") == "a"
