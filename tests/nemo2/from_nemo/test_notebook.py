# SPDX-License-Identifier: Apache-2.0
"""Notebooks are translated cell by cell; what is no script is refused."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from nemo2.cli.app import app
from nemo2.from_nemo.script import translated

CELLS = [
    ("markdown", "from nemo import lightning as nl"),
    ("code", "!pip install nemo_toolkit \\\n  extra\n%load_ext autoreload\nimport os\nfiles = !ls"),
    ("code", "%%bash\nfrom nemo import nothing"),
    (
        "code",
        "from nemo import lightning as nl\nfrom nemo.collections import llm\n\nif os.sep:\n    %time\n    x = nl.Trainer",
    ),
    ("code", "%%writefile script.py\nfrom nemo.collections.llm import HyenaModel\nllm.LlamaModel?"),
    ("code", "f = nl.teardown"),
    ("code", "this is no Python"),
]


def notebook(cells: list[tuple[str, str]]) -> str:
    listed: list[dict[str, Any]] = [
        {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
        | ({"outputs": [{"text": "é"}], "execution_count": 1} if kind == "code" else {})
        for kind, source in cells
    ]
    return json.dumps({"cells": listed, "metadata": {"kernelspec": {}}, "nbformat": 4, "nbformat_minor": 5})


def test_code_cells_are_translated_together_and_everything_else_stays(tmp_path):
    (tmp_path / "tutorial.ipynb").write_text(notebook(CELLS))
    arguments = ["translate", str(tmp_path / "tutorial.ipynb"), "-o", str(tmp_path / "new.ipynb")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    before = json.loads((tmp_path / "tutorial.ipynb").read_text())
    after = json.loads((tmp_path / "new.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in after["cells"]]
    assert sources[0] == CELLS[0][1] and sources[1] == CELLS[1][1] and sources[2] == CELLS[2][1]
    assert sources[3] == "import nemo2 as nl\nfrom nemo2 import llm\n\nif os.sep:\n    %time\n    x = nl.Trainer"
    assert sources[4].startswith("%%writefile script.py\n# from nemo.collections.llm import HyenaModel")
    assert sources[4].endswith("llm.LlamaModel?") and sources[6] == CELLS[6][1]
    for cell in (*before["cells"], *after["cells"]):
        cell.pop("source")
    assert before == after
    assert "cell 4, line 2: HyenaModel: not a decoder-only text model" in done.stderr
    assert "cell 5, line 1: nl.teardown: nemo2 has no teardown" in done.stderr
    assert "cell 6, line 1: can't be read as Python" in done.stderr


@pytest.mark.parametrize(
    ("name", "text"), [("run.ipynb", "[1]"), ("run.ipynb", "x = 1"), ("run.json", '{"a": 1}'), ("run.txt", "'nemo'")]
)
def test_what_is_no_script_is_no_success(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["translate", str(tmp_path / name)])
    assert done.exit_code not in (0, 1) or done.exception


SETTINGS = """\
from nemo.collections import llm
from nemo import lightning as nl
recipe = llm.llama3_8b.pretrain_recipe()
recipe.trainer.strategy.cross_entropy_fusion_impl = "te"
recipe.strategy.optimizer_cpu_offload = True  # of the optimizer
recipe.trainer.strategy.tensor_model_parallel_size = 2
strategy = nl.MegatronStrategy(
    cross_entropy_fusion_impl="te",
)
strategy.cross_entropy_fusion_impl = "te"
"""


def test_fields_that_a_script_sets_on_the_strategy_are_set_where_they_live():
    done = translated(SETTINGS)
    lines = done.text.splitlines()
    assert lines[3] == 'recipe.model.config.cross_entropy_fusion_impl = "te"'
    assert lines[4] == "recipe.optim.config.optimizer_cpu_offload = True  # of the optimizer"
    assert [line for line, _ in done.taken_out] == [4, 5]
    assert [line for line, _ in done.left] == [8, 10]
    assert all("model.config.cross_entropy_fusion_impl" in told for _, told in done.left)
