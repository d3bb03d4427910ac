# SPDX-License-Identifier: Apache-2.0
"""The documentation site: complete, without a dead link, and with the pages' lists and tables as GitHub shows them."""

import functools
import html
import inspect
import json
import subprocess
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from markdown_it import MarkdownIt
from pyright import node

from nemo2 import recipes
from nemo2.cli.app import app
from support.modules import doors

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
DOORS = doors("nemo2", "callbacks")
FIRST = {
    "resume a run": "checkpoints",
    "save a checkpoint": "checkpoints",
    "slurm": "clusters",
    "fine-tune with LoRA": "peft",
    "convert a Hugging Face checkpoint": "hugging_face",
    "chat data": "finetuning_data",
    "how much memory": "rehearse",
    "wandb": "measuring",
    "tokens per second": "measuring",
    "FP8": "precision",
    "serve a model": "use",
    "profiling": "measuring",
    "exit code": "environment",
    "ZeRO": "fsdp",
    "migrate from NeMo": "from_nemo",
    "MegatronStrategy": "reference/training",
}
"""The page that a search finds first, by the phrase that a user types."""
BLOCKS = {"h2", "h3", "img", "li", "ol", "pre", "table", "tr", "ul"}


class Page(HTMLParser):
    """What a page has: places that links may lead to, links, and its blocks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.blocks: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.blocks[tag] += tag in BLOCKS
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in ("script", "img", "link") and given.get("rel") != "canonical":
            self.loaded += [str(given[name]) for name in ("src", "href") if given.get(name)]


@functools.cache
def pages() -> dict[Path, Page]:
    assert SITE.is_dir(), "`make docs-site` builds the site, and then runs this"
    return {file: Page(file.read_text()) for file in sorted(SITE.rglob("*.html"))}


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_is_in_the_reference(door):
    there = {name for file, page in pages().items() if file.parent.name == "reference" for name in page.ids}
    module, missing = import_module(door), []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        doors = {f"{one}.{name}" for one in DOORS if getattr(import_module(one), name, None) is value}
        if not {*doors, f"{value.__module__}.{value.__qualname__}"} & there:
            missing.append(name)
    assert missing == []


def test_every_command_and_recipe_is_in_the_reference():
    commands, listed = pages()[SITE / "reference/commands.html"], (SITE / "reference/recipes.html").read_text()
    for name, command in typer.main.get_command(app).commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        inner = [f"nemo2-{name}-{one}" for one in getattr(command, "commands", {})] or [f"nemo2-{name}"]
        assert command.hidden or set(inner) <= commands.ids
    assert [name for name in recipes.names() if f"<code>{name}</code>" not in listed] == []


def test_no_link_is_dead():
    dead = []
    for file, page in pages().items():
        for link in page.links if file.name != "404.html" else []:  # its links begin at the server's root
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            there = there / "index.html" if there.is_dir() else there
            anchor = unquote(parts.fragment)
            if not there.is_file() or (anchor and there in pages() and anchor not in pages()[there].ids):
                dead.append(f"{file.relative_to(SITE)}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere():
    elsewhere = {
        target for page in pages().values() for target in page.loaded if urlsplit(target).scheme in ("http", "https")
    }
    assert elsewhere == set()


@pytest.mark.parametrize("source", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_a_page_has_the_blocks_that_github_shows(source):
    """MkDocs' dialect takes a list behind a line of text for more text, and wants four columns where GitHub takes two."""
    github = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    html = (SITE / source.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
    article = html[html.index("<article") : html.index("</article>")]
    assert Page(article).blocks == Page(github.render(source.read_text())).blocks


def test_a_search_finds_classes_and_settings_and_leaves_files_out():
    found = json.loads((SITE / "search/search_index.json").read_text())["docs"]
    places = {one["location"].partition("#")[0] for one in found if "MegatronStrategy" in one["title"] + one["text"]}
    assert "reference/training.html" in places
    assert not any(one["location"].startswith("source/") for one in found)


def test_a_search_finds_the_page_about_a_phrase_first():
    command = [str(Path(__file__).with_name("search.js")), str(SITE), *FIRST]
    told = node.run("node", *command, stdout=subprocess.PIPE, check=True)  # pyright's, or that of the machine
    found = json.loads(told.stdout)
    assert {phrase: pages[0].removesuffix(".html") for phrase, pages in found.items()} == FIRST


def test_parameters_that_are_described_together_are_told_one_by_one():
    from tools.site.described import apart

    after = "    c: Only.\n\nRaises:\n    ConfigError: a, b: no entry."
    both = "    {}: Both\n        of them.\n"
    for section in ("Args:", "Attributes:"):
        before = f"A.\n\n{section}\n"
        expected = before + both.format("a") + both.format("*b") + after
        for names in ("a, *b", "a,\n        *b"):
            assert apart(before + both.format(names) + after) == expected
        assert apart(f"{before}    a,\n        *b:\n        Both\n        of them.\n{after}") == expected
    assert apart("Nothing, to: take apart.") == "Nothing, to: take apart."
    assert (
        apart("Args:\n    a: One, of\n        two, three: no names.")
        == "Args:\n    a: One, of\n        two, three: no names."
    )


def test_a_parameter_that_a_class_does_not_describe_takes_the_description_of_its_base_or_module():
    from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler
    from nemo2.models.peft import DoRA, LoRA
    from tools.site.described import completed, described

    base = described(LoRA.__doc__ or "")
    told = described(completed(inspect.getdoc(DoRA) or "", DoRA))
    assert told["lora_dtype"] == base["lora_dtype"] and told.keys() == inspect.signature(DoRA).parameters.keys()
    cosine = described(completed(inspect.getdoc(CosineAnnealingScheduler) or "", CosineAnnealingScheduler))
    assert cosine["monitor"].startswith("Passed to Lightning")
    table = (SITE / "reference/peft.html").read_text()
    assert table.count(base["modules_to_save"][:40]) >= 2


def test_every_parameter_of_every_public_class_and_function_is_described():
    """Sizes of models aside, which the reference shows in tables of what they set."""
    from tools.site import reference
    from tools.site.described import descriptions

    missing = []
    named = {(home, name) for door in reference.DOORS for name, home in reference.public_names(door).items()}
    for home, name in sorted(named):
        value = getattr(import_module(home), name)
        if hasattr(value, "__dataclass_fields__") and hasattr(value, "configure_model"):
            continue
        told = descriptions(value)
        try:
            parameters = inspect.signature(value).parameters.values()
        except ValueError:  # errors with the signature of Exception
            assert inspect.isclass(value) and issubclass(value, Exception)
            parameters = ()
        missing += [] if value.__doc__ else [f"{home}.{name}"]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        missing += [
            f"{home}.{name}: {one.name}" for one in parameters if one.kind not in variadic and one.name not in told
        ]
    assert missing == []


def test_a_function_takes_the_descriptions_of_the_function_that_its_docstring_refers_to():
    from nemo2 import llm
    from tools.site.described import completed, described

    told = described(completed(inspect.getdoc(llm.validate) or "", llm.validate))
    assert told["trainer"] == described(llm.pretrain.__doc__ or "")["trainer"]
    assert told["tokenizer"] == described(llm.train.__doc__ or "")["tokenizer"]
    table = (SITE / "reference/llm.html").read_text()
    assert table.count(html.escape(told["resume"], quote=False)) >= 4  # pretrain, finetune, train, validate
