# SPDX-License-Identifier: Apache-2.0
"""The page of all recipes: what ``nemo2 list`` says of each, with the file that holds its facts."""

from typing import Any

from nemo2 import recipes
from nemo2.base.counts import short_count
from nemo2.cli.recipe_list import list_recipes, row, row_of_finetuning


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


SIZES = (24, 40, 80, 141)
"""Memory of common GPUs, in GB as they are sold."""


def page_of_gpus() -> str:
    """For each size of GPU memory the recipes whose fullest GPU fits, by `nemo2 list --fits`."""
    lines = [
        "# Which recipe for my GPU",
        "",
        "The tables list recipes whose rehearsed peak leaves 5 % of the GPU free, on the number of GPUs of the recipe's layout. "
        "A recipe stands in the table of the smallest memory that it fits; larger GPUs fit it too. `nemo2 list --fits 24GB` "
        "prints the same for any memory, and `--max-gpus 1` leaves the recipes for one GPU. A name that ends in `_24gb` or "
        "`_80gb` says the memory of the GPUs that a recipe is laid out for.",
        "",
        "A recipe runs on another number of GPUs with `--devices`, and most need more memory of each then. "
        "`nemo2 rehearse NAME --gpus RTX4090x1` counts it, and looks for a change that makes the recipe fit.",
        "",
    ]
    before: set[str] = set()
    for size in SIZES:
        found = [*list_recipes(fits=f"{size}GB").data, *list_recipes(fits=f"{size}GB", finetune=True).data]
        new = [one for one in found if one["name"] not in before]
        before |= {one["name"] for one in found}
        lines += [f"## {size} GB", "", "| recipe | size | GPUs | GiB | layout |", "|---|---:|---:|---:|---|"]
        for one in sorted(new, key=lambda one: (one["gpus"], one["peak_gib"])):
            layout = one["layout"].replace(" ", "&nbsp;")
            count = short_count(one["parameters"])
            lines.append(f"| `{one['name']}` | {count} | {one['gpus']} | {one['peak_gib']:.0f} | {layout} |")
        lines.append("")
    return "\n".join(lines)


def _table(rows: Any) -> list[str]:
    lines = ["| recipe | family | size | GPUs | layout | sequence | precision |", "|---|---|---:|---:|---|---:|---|"]
    for file, facts in rows:
        lines.append(
            f"| [`{facts['name']}`](../../recipes/{file}.py) | {facts['family']} | {short_count(facts['parameters'])} "
            f"| {facts['gpus']} | {facts['layout'].replace(' ', '&nbsp;')} | {facts['seq']} | {facts['precision']} |"
        )
    return lines
