# SPDX-License-Identifier: Apache-2.0
"""``nemo2 rehearse``: runs one step of a recipe for any number of GPUs in this process, without GPUs."""

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.cli.commands import not_with, only_with
from nemo2.cli.flags import AsJson, Devices, Gpus, Nodes, Performance, kind_of, print_json, recipe_on
from nemo2.cli.own_data import Data
from nemo2.cli.sources import Overrides, RecipeName
from nemo2.gpus import DEFAULT, HEADROOM

REHEARSE_EXAMPLE = "Example: nemo2 rehearse llama31_405b --gpus H100x1152 strategy.pipeline_model_parallel_size=9"


def register(app: typer.Typer) -> None:
    app.command("rehearse", epilog=REHEARSE_EXAMPLE)(rehearse)


def rehearse(
    name: RecipeName,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    devices: Devices = None,
    performance: Performance = False,
    data: Data = None,
    headroom: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Fraction of GPU memory that must stay free.")
    ] = HEADROOM,
    kernels: Annotated[
        str, typer.Option(help="'te': layers of Transformer Engine. 'plain': plain PyTorch layers.")
    ] = "te",
    all_stages: Annotated[
        bool, typer.Option("--all-stages", help="Rehearse a rank of every pipeline stage instead of three stages.")
    ] = False,
    advice: Annotated[
        bool,
        typer.Option(
            "--advice/--no-advice", help="If the job doesn't fit, search for the smallest change that makes it fit."
        ),
    ] = True,
    as_json: AsJson = False,
    html: Annotated[Optional[Path], typer.Option(help="Also write an HTML page with figures.")] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Shrink the recipe and train it on CPU processes of this machine.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="With --tiny: maximum number of processes; the layout needs 1 to 16.")
    ] = 8,
    steps: Annotated[int, typer.Option(min=1, help="With --tiny: number of optimizer steps.")] = 5,
    directory: Annotated[Optional[Path], typer.Option("--dir", help="With --tiny: directory for all runs.")] = None,
) -> None:
    """Count the memory, messages and FLOPs of a job of any size, without GPUs.

    Runs one step of one rank of each kind on meta tensors. Exit code 0: the job fits its GPUs. 1: it doesn't fit.

    With --tiny, trains a shrunk recipe with the same kinds of parallelism, callbacks, data module, logger and checkpoints.
    """
    not_with("tiny", "headroom", "kernels", "all_stages", "advice", "as_json", "html")
    only_with("tiny", "processes", "steps", "directory")
    if not tiny:
        # Set before torch is imported. The rehearsal replaces parts of torch.cuda, which must not affect a real GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    recipe = recipe_on(name, overrides, gpus=gpus, nodes=nodes, devices=devices, performance=performance, data=data)
    if tiny:
        _train_tiny(recipe, name, processes=processes, steps=steps, directory=directory)
        return
    from nemo2.rehearse.job import rehearse as run
    from nemo2.rehearse.text import render

    kind = kind_of(gpus) or DEFAULT
    result = run(recipe, name=name, gpus=kind, headroom=headroom, kernels=kernels, all_stages=all_stages, advice=advice)
    print_json(result.to_dict()) if as_json else print(render(result))
    if html is not None:
        from nemo2.rehearse.page import write_page

        write_page(result, html, _rates(result.gpu))
        if not as_json:
            print(f"page: {html}")
    if not result.verdict.fits:
        raise typer.Exit(1)


REACHED = 0.5
"""The fraction of the data sheet's FLOP/s that the pipeline's picture assumes for matrix products."""


def _rates(gpu: str) -> Any:
    from nemo2.gpus import gpu as data_sheet
    from nemo2.rehearse.step_timeline import Rates

    sheet = data_sheet(gpu)
    return Rates(
        flops=REACHED * sheet.rate("bf16"), link=sheet.nvlink, network=sheet.network, gpus_per_node=sheet.domain
    )


def _train_tiny(recipe: Any, name: str, *, processes: int, steps: int, directory: Optional[Path]) -> None:
    from nemo2.launch import launch
    from nemo2.rehearse.shrink import shrink

    small = shrink(recipe, max_processes=processes, steps=steps)
    small.recipe.log.name = f"{name}_tiny"
    small.recipe.resume.resume_if_exists = False  # every rehearsal starts anew
    if directory is not None:
        small.recipe.log.log_dir = str(directory)
    for note in small.notes:
        print(f"note: {note}")
    print(
        f"{name}, shrunk: {steps} step{'s' * (steps > 1)} on {small.processes} CPU process{'es' * (small.processes > 1)}"
    )
    result = launch(small.recipe, "local", devices=small.processes)
    if result.run_dir is not None:
        print(f"run directory: {result.run_dir}")
