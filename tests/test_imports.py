# SPDX-License-Identifier: Apache-2.0
"""What the contracts of import-linter (pyproject.toml, `make check`) don't see: bare names, licences, and who may call what."""

import ast
import re
import tomllib

import pytest

from support.modules import ROOT, modules


@pytest.mark.parametrize("contract", ["rooms", "inside-base", "inside-mcore", "inside-training", "inside-preflight"])
def test_the_page_lists_the_layers_of_the_contract(contract):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["id"] == contract)
    names = [name for layer in layers for name in layer.split(" | ")]
    page = (ROOT / "docs" / "architecture.md").read_text()
    start = r"\*\*`" if contract == "rooms" else f"`{contract.removeprefix('inside-')}/"
    assert sorted(re.findall(rf"^\| {start}(\w+)(?:/|\.py)`", page, re.MULTILINE)) == sorted(names)


def test_nobody_imports_the_folders_by_their_bare_names():
    bare = re.compile(r"^ *(?:from|import) (?:recipes|callbacks|tests|tools|support|bench)\b.*", re.MULTILINE)
    assert {str(file): lines for file in modules().values() if (lines := bare.findall(file.read_text()))} == {}


def test_every_file_starts_with_its_licence_and_says_what_it_is_for():
    for file in modules().values():
        text = file.read_text()
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), file
        assert ast.get_docstring(ast.parse(text)), file


@pytest.mark.parametrize(
    ("names", "module"),
    [
        (("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"), "nemo2.base.ranks"),
        (("_getframe", "currentframe", "f_back", "f_globals", "f_locals"), "nemo2.config.provenance"),
    ],
)
def test_one_module_exchanges_objects_between_ranks_and_one_looks_at_frames(names, module):
    texts = {
        user: text for user, file in modules().items() if any(name in (text := file.read_text()) for name in names)
    }
    users = {
        user
        for user, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.alias)
        and (node.attr if isinstance(node, ast.Attribute) else node.name) in names
    }
    assert users == {module}


def test_a_rank_imports_neither_what_loads_nor_what_only_a_launch_needs():
    """By the imports that stand at the first level of a module. A rank of a first run imports those that it starts with."""
    files, left = modules(), ["nemo2.llm.api", "nemo2.training.strategy", "nemo2.data.demo", "nemo2.models.llama"]
    reached: set[str] = set()
    while left:
        if (name := left.pop()) in reached or name not in files:
            continue
        reached.add(name)
        left.append(name.rpartition(".")[0])
        for node in ast.parse(files[name].read_text()).body:
            if isinstance(node, ast.ImportFrom):
                left += [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]
    loading = {f"nemo2.checkpoint.{name}" for name in ("loading", "reading", "untrusted")}
    launching = {f"nemo2.preflight.checks.{name}" for name in ("find", "megatron", "nearest", "earlier")}
    others = {
        "nemo2.base.columns",
        "nemo2.base.gpus",
        "nemo2.training.run_dir.hang_diagnosis",
        "nemo2.data.input_changes",
    }
    assert len(reached) > 100 and not reached & (loading | launching | others)
