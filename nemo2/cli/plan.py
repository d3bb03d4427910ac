# SPDX-License-Identifier: Apache-2.0
"""``nemo2 plan``: predicts a recipe's speed, memory and cost, and searches for faster layouts."""

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import not_with, only_with
from nemo2.cli.flags import AsJson, Devices, Gpus, Nodes, Performance, kind_of, number_of, print_json, put, recipe_on
from nemo2.cli.own_data import Data
from nemo2.cli.sources import Overrides, RecipeName
from nemo2.gpus import DEFAULT, HEADROOM

PLAN_EXAMPLE = "Example: nemo2 plan llama3_70b --gpus H100x64 --tokens 1e12 --cost-per-gpu-hour 2.5"


def register(app: typer.Typer) -> None:
    app.command("plan", epilog=PLAN_EXAMPLE)(plan)


def plan(
    name: RecipeName,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    devices: Devices = None,
    performance: Performance = False,
    data: Data = None,
    tokens: Annotated[
        Optional[str],
        typer.Option("--tokens", help="Tokens to train on, such as 1T or 1e12; predicts the days that the run takes."),
    ] = None,
    price: Annotated[
        Optional[float],
        typer.Option("--cost-per-gpu-hour", min=0, help="With --tokens: price of a GPU hour; predicts the cost."),
    ] = None,
    mtbf: Annotated[
        Optional[float],
        typer.Option(
            "--gpu-hours-per-failure",
            min=1,
            help="With --tokens: GPU hours between interruptions. Default: 50,677, as for Llama 3 405B.",
        ),
    ] = None,
    save: Annotated[
        float, typer.Option("--save-seconds", min=0, help="With --tokens: seconds that a save stalls training.")
    ] = 6.3,
    restart: Annotated[
        float,
        typer.Option("--restart-seconds", min=0, help="With --tokens: seconds from an interruption to the next step."),
    ] = 600.0,
    headroom: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Fraction of GPU memory that must stay free.")
    ] = HEADROOM,
    search: Annotated[
        bool, typer.Option("--search", help="Search for the fastest legal layouts of the recipe on these GPUs.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="With --search: number of layouts to print.")] = 5,
    seq: Annotated[
        Optional[int], typer.Option("--seq", min=1, help="Tokens per sequence; sets data.seq_length.")
    ] = None,
    global_batch: Annotated[
        Optional[int], typer.Option("--global-batch", min=1, help="Sequences per step; sets data.global_batch_size.")
    ] = None,
    html: Annotated[
        Optional[Path], typer.Option(help="With --search: also write an HTML page with a scatter plot.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a run's speed with an error band, time per step, memory, duration and cost, without running it.

    Exit code 0: the run fits its GPUs. 1: it doesn't fit.
    """
    not_with("search", "tokens", "price", "mtbf", "save", "restart")
    only_with("search", "limit", "html")
    only_with("tokens", "price", "mtbf", "save", "restart")
    # Hides GPUs from the rehearsal. Must be set before torch is imported.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    recipe = recipe_on(name, overrides, gpus=gpus, nodes=nodes, devices=devices, performance=performance, data=data)
    kind = kind_of(gpus) or DEFAULT
    for option, field, value in (("--seq", "seq_length", seq), ("--global-batch", "global_batch_size", global_batch)):
        if value is not None:
            put(recipe.data, field, value, option=option, path=f"data.{field}")
    if search:
        _search(recipe, name=name, kind=kind, limit=limit, headroom=headroom, html=html, as_json=as_json)
        return
    from nemo2.planner.goodput import Failures
    from nemo2.planner.plan import plan as make
    from nemo2.planner.text import render

    failures = Failures.of_llama3(
        save_seconds=save, restart_seconds=restart, **({"per_gpu_hour": 1 / mtbf} if mtbf else {})
    )
    made = make(
        recipe,
        name=name,
        gpus=kind,
        tokens=None if tokens is None else number_of(tokens, option="--tokens", forms="a number of tokens, such as 1T"),
        cost_per_gpu_hour=price,
        failures=failures,
        headroom=headroom,
    )
    print_json(made.to_dict()) if as_json else print(render(made))
    if not made.fits:
        raise typer.Exit(1)


def _search(
    recipe: Any, *, name: str, kind: str, limit: int, headroom: float, html: Optional[Path], as_json: bool
) -> None:
    from nemo2.gpus import gpu
    from nemo2.planner.recipe import read_recipe
    from nemo2.planner.search import as_dict
    from nemo2.planner.search import search as look
    from nemo2.planner.text import render_search
    from nemo2.settle import Machine, on

    subject = read_recipe(on(recipe, Machine.named(kind)), gpu(kind))
    found = look(subject, limit=limit, headroom=headroom)
    title = f"{name} on {subject.job.gpus} x {subject.job.gpu.name}"
    print_json(as_dict(found)) if as_json else print(render_search(found, title=title))
    if html is not None:
        from nemo2.planner.page import write_page

        write_page(found, html, title=title)
        if not as_json:
            print(f"page: {html}")
