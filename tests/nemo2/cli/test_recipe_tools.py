# SPDX-License-Identifier: Apache-2.0
"""``list`` with filters and own recipes, ``show --diff`` and ``--python``, ``new-recipe``: what they print, write and refuse."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.cli import show as shown_recipe
from nemo2.cli.adapter import described
from nemo2.cli.app import VERBS
from nemo2.cli.flags import number_of
from nemo2.cli.recipe_list import has_layout, list_recipes, memory_of, row, row_of_tree, within
from nemo2.cli.sources import name_of_run, recipe_tree
from nemo2.config import Config, to_json
from nemo2.recipes import _own

pytestmark = pytest.mark.usefixtures("no_own_recipes")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("option", "keeps"),
    [
        ("--family 'qwen 3'", lambda r: r["family"].startswith("Qwen 3")),
        ("--max-gpus 8", lambda r: r["gpus"] <= 8),
        ("--min-params 7B --max-params 9e9", lambda r: 7e9 <= r["parameters"] <= 9e9),
        ("--precision bf16", lambda r: "bf16" in r["precision"]),
        ("--layout 'pp cp=2'", lambda r: "pp=" in r["layout"] and "cp=2" in r["layout"].split()),
        ("--shipped", lambda r: True),
        ("llama* --max-gpus 8 --layout tp=2", lambda r: r["name"] in ("llama_tiny", "llama2_7b")),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_a_filter_keeps_exactly_what_it_says(option, keeps, command):
    expected = [row["name"] for row in command("list --json").json if keeps(row)]
    assert [row["name"] for row in command(f"list --json {option}").json] == expected != []


def test_own_recipes_are_listed_with_where_they_are_from_and_a_broken_one_is_named(tmp_path, monkeypatch, command):
    command("new-recipe own_page --from llama3_8b --output own")
    command("show llama_tiny trainer.max_steps=3 --output own/own_frozen.py")
    (tmp_path / "own" / "own_broken.py").write_text("import no_such_module")
    monkeypatch.setenv(_own.VARIABLE, "own")
    out, err = command("list")
    lines = out.splitlines()
    assert len(lines) == 1 + len(recipes.names()) + 3 and lines[0].split()[-1] == "origin"
    assert any(line.startswith("own_page ") and line.endswith("own/own_page.py") for line in lines)
    assert err.startswith("not listed: own_broken: ") and "No module named 'no_such_module'" in err
    assert {row["name"] for row in command("list --json --own").json} == {"own_page", "own_frozen"}
    assert "data.seq_length=8192" in command("show own_page --flat").out.splitlines()


def test_a_recipe_without_facts_is_listed_by_its_tree_as_the_facts_have_it():
    for name in ("llama_tiny", "nemotronh_8b", "deepseek_v2", "gpt3_175b"):
        facts = row(recipes.get(name).RECIPE)
        tree = recipes.get(name).pretrain_recipe()
        tree.model.config.vocab_size = recipes.get(name).RECIPE.vocabulary or 2048
        found = row_of_tree(tree)
        for column in ("gpus", "layout", "seq"):
            assert found[column] == facts[column], (name, column)
        assert found["parameters"] == pytest.approx(facts["parameters"], rel=0.005)
        assert found["precision"].replace("-", "_") == facts["precision"]


def test_own_recipes_of_odd_models_are_counted():
    """A pattern with a cut ended the whole list; layers of their own widths were counted as if all had the config's."""
    from nemo2.models.llama_nemotron import Llama33NemotronSuper49BConfig

    hybrid = recipes.get("nemotronh_8b").pretrain_recipe()
    pattern = hybrid.model.config.hybrid_override_pattern
    hybrid.model.config.hybrid_override_pattern = f"{pattern[:26]}|{pattern[26:]}"
    assert row_of_tree(hybrid)["parameters"] == pytest.approx(8.1e9, rel=0.005)
    uneven = recipes.get("llama31_70b").pretrain_recipe()
    uneven.model.config = Config(Llama33NemotronSuper49BConfig, vocab_size=128_256)
    assert row_of_tree(uneven)["parameters"] == pytest.approx(49.87e9, rel=0.001)


def test_counts_limits_and_layouts_as_typed():
    numbers = {"7B": 7e9, "350m": 350e6, "1.5T": 1.5e12, "12k": 12e3, "7e9": 7e9, "1e12": 1e12}
    assert {text: number_of(text, option="--x", forms="a number") for text in numbers} == numbers
    for text in ("big", "", "T", "nan", "inf", "1e400"):
        with pytest.raises(ConfigError, match=f"--min-params {text}: must be a number of parameters, such as 7B"):
            number_of(text, option="--min-params", forms="a number of parameters, such as 7B")
    assert within(None, None, None) and not within(None, 1, None) and within(5, 5, 5) and not within(5, 6, None)
    assert has_layout("tp=2 pp=4 sp", "pp,sp") and has_layout("tp=2", "TP=2") and not has_layout("tp=2 pp=4", "pp=2")
    assert has_layout("dp", "dp") and not has_layout("tp=2", "t")


def test_diff_shows_what_differs_and_ends_as_asked(command):
    diff = "show llama_tiny --diff llama_tiny"
    assert command(f"{diff} trainer.max_steps=7 trainer.logger=false --exit-code", code=1).out.splitlines() == [
        "--- llama_tiny",
        "+++ llama_tiny trainer.max_steps=7 trainer.logger=false",
        "~ trainer.logger: None -> False",
        "~ trainer.max_steps: 300 -> 7",
    ]
    assert command(f"{diff} --exit-code").out == "no difference\n"
    assert command(f"{diff} trainer.benchmark=null --exit-code").out.startswith("no difference in effect\n")
    assert "~ model.config: Llama3Config8B -> Llama3Config70B" in command("show llama3_70b --diff llama3_8b").out
    assert command(f"{diff} trainer.max_steps=7 --json").json == [
        {"path": "trainer.max_steps", "kind": "set", "old": 300, "new": 7, "in_effect": True}
    ]


def test_diff_is_coloured_for_people_only(command, monkeypatch):
    monkeypatch.setattr(shown_recipe, "is_terminal", lambda _: True)
    shown = command("show llama_tiny --diff llama_tiny trainer.max_steps=7").out
    assert "\033[33m~ trainer.max_steps: 300 -> 7\033[0m" in shown


def test_the_code_of_diff_turns_one_into_the_other(command):
    namespace: dict[str, Any] = {}
    exec(command("show llama3_8b --diff llama_tiny --python").out, namespace)
    recipe = namespace["edit"](recipes.get("llama_tiny").pretrain_recipe())
    assert recipe == recipes.get("llama3_8b").pretrain_recipe()


def test_recipes_files_json_and_run_directories_stand_for_the_same(tmp_path, command):
    expected = recipes.get("llama_tiny").pretrain_recipe()
    (tmp_path / "run").mkdir()
    for file in ("run/recipe.json", "one.json"):
        (tmp_path / file).write_text(to_json(expected))
    command("show llama_tiny -o frozen_tiny.py")
    sources = ("llama_tiny", "run", "./run", "one.json", "./frozen_tiny.py", "frozen_tiny.py:pretrain_recipe")
    for source in sources:
        assert recipe_tree(source) == expected, source
    assert [name_of_run(source, expected) for source in sources] == [
        "llama_tiny", "default", "default", "default", "frozen_tiny", "frozen_tiny_pretrain_recipe",
    ]  # fmt: skip
    command("show run --diff llama_tiny --exit-code")


def test_a_python_recipe_that_names_its_run_keeps_the_name(command):
    Path("named.py").write_text(
        "from nemo2.recipes import llama_tiny\n"
        "def pretrain_recipe():\n    return llama_tiny.pretrain_recipe(name='tuned')\n"
    )
    command("show ./named.py -o frozen_named.py")
    for source in ("./named.py", "./frozen_named.py", "named.py:pretrain_recipe"):
        assert "writes to   nemo_experiments/tuned" in " ".join(command(f"pretrain {source} --dryrun").err.split("\n"))
    assert "nemo_experiments/other" in command("pretrain ./named.py --dryrun --name other").err


def test_a_json_may_name_what_a_users_own_recipes_define_and_nothing_else(tmp_path, monkeypatch, command):
    (tmp_path / "own_data.py").write_text(
        "from nemo2.config import configurable\n@configurable\nclass Data:\n    def __init__(self, n: int = 1):\n"
        "        self.n = n\ndef pretrain_recipe(): pass\n"
    )
    recipe = recipes.get("llama_tiny").pretrain_recipe()
    text = to_json(recipe).replace('"nemo2.data.demo"', '"own_data"').replace('"StdlibDataModule"', '"Data"')
    (tmp_path / "strange.json").write_text(text.replace('"vocab_size"', '"n"'))
    assert "list their folder in $NEMO2_RECIPES" in command("show strange.json", code=2).err
    assert "own_data" not in sys.modules
    monkeypatch.setenv(_own.VARIABLE, str(tmp_path))
    (tmp_path / "bomb.json").write_text(to_json(recipe).replace('"nemo2.data.demo"', '"os"'))
    command("show bomb.json", code=2)
    assert "own_data" not in sys.modules


def test_what_freeze_writes_is_the_recipe_with_its_changes(command):
    told = command("show llama3_8b trainer.max_steps=100 --output my_llama.py").out
    assert "nemo2 pretrain ./my_llama.py" in told
    recipe = recipes.get("llama3_8b").pretrain_recipe()
    recipe.trainer.max_steps = 100
    assert recipe_tree("./my_llama.py") == recipe
    assert Path("my_llama.py").read_text().startswith('"""llama3_8b trainer.max_steps=100, as nemo2 ')
    namespace: dict[str, Any] = {}
    exec(command("show llama_tiny --python", 'log.name=say"""x\\y').out, namespace)
    assert namespace["pretrain_recipe"]().log.name == 'say"""x\\y'


@pytest.mark.parametrize("parent", ["llama3_8b", "nemotronh_8b", "./frozen_tiny.py", "./own_page.py"])
def test_a_new_page_is_its_parent_until_it_is_changed(parent, command):
    command("show llama_tiny -o frozen_tiny.py")
    command("new-recipe own_page --from llama_tiny")
    said = command("new-recipe own_new --from", parent, "--output", "pages of mine").out
    assert "`nemo2 show 'pages of mine/own_new.py'`" in said
    assert recipe_tree("pages of mine/own_new.py") == recipe_tree(parent)
    text = Path("pages of mine/own_new.py").read_text()
    for line in (
        line for line in text.splitlines() if line.startswith("    # ") and "=" in line and "Layout" not in line
    ):
        changed = text.replace(line, line.replace("# ", "", 1))
        Path("own_changed.py").write_text(changed)
        _own._loaded.clear()
        sys.modules.pop("own_changed", None)
        recipe_tree("./own_changed.py")


@pytest.mark.parametrize("words", ["list", "show", "new-recipe"])
def test_an_example_works(words, command):
    command(shlex.join(shlex.split(described(VERBS[words])[2])[1:]))


@pytest.mark.parametrize("options", ["", "--python"])
def test_a_recipe_is_shown_and_written_down_for_the_gpus_that_are_named(options, command):
    told = command(f"show {options} llama3_8b trainer.devices=auto --gpus H100x64")
    found = dict(re.findall(r"\b(num_nodes|devices)(?:=|: )(\w+)", told.out))
    assert found == {"num_nodes": "8", "devices": "8"}
    assert told.err == "for 8 nodes x 8 H100\n"
    assert command(f"show {options} llama3_8b").err == "for 1 node x 8 GPUs of any kind\n"


def test_recipes_that_fit_a_gpu_are_those_whose_rehearsed_peak_leaves_room():
    from nemo2.base.gpus import GIB, HEADROOM, gpu

    everything = {one["name"]: one for one in list_recipes().data}
    fit = {one["name"] for one in list_recipes(fits="24GB").data}
    assert fit == {
        name for name, one in everything.items() if one["peak_gib"] <= gpu("L4").memory / GIB * (1 - HEADROOM)
    }
    assert {"llama_tiny"} < fit < everything.keys()
    with pytest.raises(ConfigError, match="--fits 'lots': must be one of .*, or a memory such as 24GB"):
        list_recipes(fits="lots")
    # Torch sees 22 GiB of an L4 and 23.5 of an RTX 4090, which are sold with 24 GB.
    assert memory_of("24GB") == gpu("L4").memory and memory_of("30GB") == 30 * GIB
    assert memory_of("A100-40") == memory_of("40GB") == gpu("A100-40").memory
