# SPDX-License-Identifier: Apache-2.0
"""How recipe modules read: short, about their own facts, and honest about the machines they are for."""

import ast
import io
import re
import statistics
import time
import tokenize
from pathlib import Path

from nemo2 import recipes
from nemo2.base.gpus import answer_of
from nemo2.cli.recipe_list import memory_of
from nemo2.preflight.planner.peaks import rehearsed
from nemo2.preflight.rehearse.counts import peak_of

FOLDER = Path(recipes.__file__).parent
NAMES = recipes.names()
NUMBERS = {1: "one node", 2: "two nodes"}


def lines_of_code(path: Path) -> int:
    """Lines that hold code: neither empty, nor comment, nor the module's docstring."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    skipped = set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in ignored} - skipped)


def test_most_recipes_take_a_dozen_lines():
    counts = {name: lines_of_code(FOLDER / f"{name}.py") for name in NAMES}
    assert statistics.median(counts.values()) <= 12
    assert {name for name, count in counts.items() if count > 30} <= {"deepseek_v3", "llama_tiny"}


def test_a_recipe_names_the_machines_and_the_sequence_it_is_laid_out_for():
    for name in (name for name in NAMES if name != "llama_tiny"):
        module = recipes.get(name)
        facts, said = module.RECIPE, (module.__doc__ or "").splitlines()[0]
        memory = match[1] if (match := re.search(r"_(\d+)gb$", name)) else "80"
        nodes = f"{NUMBERS.get(facts.nodes, f'{facts.nodes} nodes')} of {facts.gpus_per_node} x"
        machines = f"for {'one GPU of' if facts.gpus_per_node == 1 else nodes} {memory} GB."
        assert said.endswith(f"at {facts.seq_length:,} tokens, {machines}"), name


def test_no_two_recipes_state_the_same_run():
    stated = {}
    for name in NAMES:
        facts = recipes.get(name).RECIPE
        run = repr(
            (facts.model_class, facts.config_class, facts.layout, facts.seq_length, facts.nodes, facts.gpus_per_node)
        )
        assert run not in stated, (name, stated.get(run))
        stated[run] = name


def test_every_recipe_of_a_family_says_only_what_its_table_does_not():
    """A fact repeated from the family's table would go stale on its own."""
    from nemo2.recipes import _families

    for name in NAMES:
        call = next(
            node
            for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
            if isinstance(node, ast.Call) and any(keyword.arg == "name" for keyword in node.keywords)
        )
        table = getattr(_families, call.func.id, None) if isinstance(call.func, ast.Name) else None
        if table is None or not hasattr(table, "keywords"):
            continue
        for keyword in call.keywords:
            if keyword.arg in table.keywords and isinstance(keyword.value, ast.Constant):
                assert keyword.value.value != table.keywords[keyword.arg], (name, keyword.arg)


def test_all_recipes_together_build_in_seconds():
    recipes.get("llama3_8b").pretrain_recipe()  # imports
    started = time.process_time()
    for name in NAMES:
        recipes.get(name).pretrain_recipe()
    assert time.process_time() - started < 20


def test_hardware_is_named_by_variants_too():
    for name in NAMES:
        if match := re.search(r"_(\d+)k$", name):
            assert recipes.get(name).RECIPE.seq_length == int(match[1]) * 1024


def test_a_recipe_fits_the_memory_in_its_name():
    """In every form, by its rehearsal."""
    for name, one in rehearsed().items():
        if match := re.search(r"_(\d+)gb\b", name):
            assert answer_of(peak_of(one["ranks"]), memory_of(f"{match[1]}GB")) == "fits", name
