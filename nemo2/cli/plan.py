# SPDX-License-Identifier: Apache-2.0
"""``nemo2 plan``: predicts a recipe's speed, memory and cost, and searches for faster layouts."""

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.files import write_file
from nemo2.base.gpus import DEFAULT, HEADROOM, gpu
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.commands import not_with, only_with
from nemo2.cli.flags import UNCHANGED, Html, RecipeOptions, kind_of, number_of, recipe_on, set_option
from nemo2.cli.sources import Overrides, RecipeName


def plan(
    name: RecipeName,
    overrides: Overrides = None,
    *,
    options: RecipeOptions = UNCHANGED,
    tokens: Optional[str] = None,
    price: Annotated[Optional[float], typer.Option("--cost-per-gpu-hour", min=0)] = None,
    mtbf: Annotated[Optional[float], typer.Option("--gpu-hours-per-failure", min=1)] = None,
    save: Annotated[float, typer.Option("--save-seconds", min=0)] = 6.3,
    restart: Annotated[float, typer.Option("--restart-seconds", min=0)] = 600.0,
    headroom: Annotated[float, typer.Option(min=0.0, max=0.9)] = HEADROOM,
    search: bool = False,
    limit: Annotated[int, AT_LEAST_1] = 5,
    seq: Annotated[Optional[int], AT_LEAST_1] = None,
    global_batch: Annotated[Optional[int], AT_LEAST_1] = None,
    html: Html = None,
) -> Result:
    """Predict a run's speed, memory, duration and cost.

    Runs nothing. The speed has an error band; the time is split by what a step does.

    Exit code 0: the run fits its GPUs. 1: it doesn't fit.

    Args:
        tokens: Tokens to train on, such as 1T or 1e12; predicts the days that the run takes.
        price: With --tokens: price of a GPU hour; predicts the cost.
        mtbf: With --tokens: GPU hours between interruptions. Default: 50,677, as for Llama 3 405B.
        save: With --tokens: seconds that a save stalls training.
        restart: With --tokens: seconds from an interruption to the next step.
        headroom: Fraction of GPU memory that must stay free.
        search: Search for the fastest legal layouts of the recipe on these GPUs.
        limit: With --search: number of layouts to print.
        seq: Tokens per sequence; sets data.seq_length.
        global_batch: Sequences per step; sets data.global_batch_size.
        html: With --search: also write an HTML page with a scatter plot.

    Example: nemo2 plan llama3_70b --gpus H100x64 --tokens 1e12 --cost-per-gpu-hour 2.5
    """
    not_with("search", "tokens", "price", "mtbf", "save", "restart")
    only_with("search", "limit", "html")
    only_with("tokens", "price", "mtbf", "save", "restart")
    # Hides GPUs from the rehearsal. Must be set before torch is imported.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    recipe = recipe_on(name, overrides, options=options)
    kind = kind_of(options.gpus) or DEFAULT
    for option, field, value in (("--seq", "seq_length", seq), ("--global-batch", "global_batch_size", global_batch)):
        if value is not None:
            set_option(recipe.data, field, value, option=option, path=f"data.{field}")
    if search:
        return _search(recipe, name=name, kind=kind, limit=limit, headroom=headroom, html=html)
    from nemo2.preflight.planner.goodput import Failures
    from nemo2.preflight.planner.plan import plan as make
    from nemo2.preflight.planner.text import render

    failures = Failures.of_llama3(
        save_seconds=save, restart_seconds=restart, **({"per_gpu_hour": 1 / mtbf} if mtbf else {})
    )
    prediction = make(
        recipe,
        name=name,
        gpus=kind,
        tokens=None if tokens is None else number_of(tokens, option="--tokens", forms="a number of tokens, such as 1T"),
        cost_per_gpu_hour=price,
        failures=failures,
        headroom=headroom,
    )
    return Result(prediction.to_dict(), render(prediction), int(not prediction.fits))


def _search(recipe: Any, *, name: str, kind: str, limit: int, headroom: float, html: Optional[Path]) -> Result:
    from nemo2.mcore.settle import Machine, on
    from nemo2.preflight.planner.recipe import read_recipe
    from nemo2.preflight.planner.search import as_dict
    from nemo2.preflight.planner.search import search as look
    from nemo2.preflight.planner.text import render_search

    subject = read_recipe(on(recipe, Machine.named(kind)), gpu(kind))
    result = look(subject, limit=limit, headroom=headroom)
    title = f"{name} on {subject.job.gpus} x {subject.job.gpu.name}"
    text = render_search(result, title=title)
    if html is not None:
        from nemo2.preflight.planner.page import render_page

        write_file(html, render_page(result, title=title))
        text += f"\npage: {html}"
    return Result(as_dict(result), text)
