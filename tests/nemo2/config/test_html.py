# SPDX-License-Identifier: Apache-2.0
"""A recipe in a notebook, as IPython itself would show it."""

from html.parser import HTMLParser
from typing import Any

import nemo_run as run
import pytest
from IPython.core.formatters import DisplayFormatter

from nemo2 import llm
from nemo2.config import Config, render
from nemo2.config.html import html_tree
from support.config_samples import Callback, Options, recipe


class Elements(HTMLParser):
    """Tags that are open at the end, those that were met, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.met: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.met.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("path", ["", "trainer", "trainer.strategy", "model.config"])
def test_a_recipe_and_each_part_of_it_shows_as_a_tree(path: str) -> None:
    shown: Any = llm.llama_tiny.pretrain_recipe()
    for name in filter(None, path.split(".")):
        shown = getattr(shown, name)
    data, _ = DisplayFormatter().format(shown)
    assert data["text/plain"] == render(shown) and "object at 0x" not in data["text/plain"]
    assert set(data) == {"text/plain", "text/html"}, "one picture, not two"
    found = Elements(data["text/html"])
    assert not found.open and "script" not in found.met and "details" in found.met
    assert "http" not in data["text/html"]


def test_it_says_what_is_set_and_who_set_it() -> None:
    made: Any = recipe()
    made.options = Config(Options, name="<b>&", note="x" * 500)
    shown = html_tree(made)
    text = Elements(shown).text
    assert "name '<b>&'" in text and "<b>&'" not in shown and f"note '{'x' * 150}" in text and "x" * 200 not in text
    assert "strategy Strategy" in text and "tensor_parallel 2" in text
    assert "test_html.py:" in shown and "max_steps" not in text, "a default isn't set"


def test_a_config_that_is_shared_is_shown_once() -> None:
    made: Any = recipe()
    shared = Config(Callback, every=5)
    made.trainer.callbacks = [shared, shared]
    text = Elements(html_tree(made)).text
    assert text.count("every 5") == 1 and "same as trainer.callbacks[0]" in text and "callbacks 2 of them" in text


def test_configs_in_a_list_show_as_configs_and_not_as_objects() -> None:
    made: Any = llm.llama_tiny.pretrain_recipe()
    data, _ = DisplayFormatter().format([made.optim.config, *made.trainer.callbacks])
    assert data["text/plain"].startswith("[<Config[OptimizerConfig(") and "TimingCallback(" in data["text/plain"]
    assert " at 0x" not in data["text/plain"]


@pytest.mark.parametrize("kind", [run.Config, run.Partial])
def test_nemo_runs_own_configs_show_as_a_tree_without_graphviz(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data, _ = DisplayFormatter().format(kind(Options, name="mine"))
    assert set(data) == {"text/plain", "text/html"} and "name 'mine'" in Elements(data["text/html"]).text
    data, _ = DisplayFormatter().format(run.LocalExecutor())
    assert set(data) == {"text/plain"}
    assert capsys.readouterr() == ("", "")
