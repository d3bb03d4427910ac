# SPDX-License-Identifier: Apache-2.0
"""The page of all recipes: what ``nemo2 list`` says of each, with the file that holds its facts."""

from typing import Any

from nemo2 import recipes
from nemo2.cli.recipe_list import row, row_of_finetuning


def page() -> str:
    """Two tables, of pre-training and of fine-tuning."""
    shipped = [(name, recipes.get(name)) for name in recipes.names()]
    lines = [
        "# Recipes",
        "",
        "This page lists every recipe that nemo2 ships. The column GPUs is the number of GPUs that the recipe's layout is made "
        "for. [Recipes](../recipes.md) shows how to change a recipe. [Every recipe, rehearsed](../rehearsed_recipes.md) lists "
        "the memory that each recipe needs.",
        "",
        "## Pre-training",
        "",
        "Use `llm.NAME.pretrain_recipe()` in Python, or the command `nemo2 pretrain NAME`.",
        "",
        *_table((name, row(module.RECIPE)) for name, module in shipped if module.RECIPE is not None),
        "",
        "## Fine-tuning",
        "",
        "Use `llm.NAME.finetune_recipe(peft_scheme=...)` in Python, or the command `nemo2 finetune NAME:METHOD`.",
        "",
        *_table(
            (name, row_of_finetuning(module.FINETUNE, method))
            for name, module in shipped
            if getattr(module, "FINETUNE", None) is not None
            for method in ("lora", "full")
        ),
        "",
    ]
    return "\n".join(lines)


def _table(rows: Any) -> list[str]:
    lines = ["| recipe | family | size | GPUs | layout | sequence | precision |", "|---|---|---:|---:|---|---:|---|"]
    for file, facts in rows:
        lines.append(
            f"| [`{facts['name']}`](../../recipes/{file}.py) | {facts['family']} | {_count(facts['parameters'])} "
            f"| {facts['gpus']} | {facts['layout'].replace(' ', '&nbsp;')} | {facts['seq']} | {facts['precision']} |"
        )
    return lines


def _count(parameters: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
