# SPDX-License-Identifier: Apache-2.0
"""``nemo2 rehearse``: runs one step of a recipe for any number of GPUs in this process, without GPUs."""

import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from nemo2.base.files import write_file
from nemo2.base.gpus import DEFAULT, HEADROOM
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.commands import not_with, only_with
from nemo2.cli.flags import UNCHANGED, Html, RecipeOptions, kind_of, recipe_on
from nemo2.cli.sources import Overrides, RecipeName, name_of_run


def rehearse(
    name: RecipeName,
    overrides: Overrides = None,
    *,
    options: RecipeOptions = UNCHANGED,
    headroom: Annotated[float, typer.Option(min=0.0, max=0.9)] = HEADROOM,
    kernels: str = "te",
    all_stages: bool = False,
    advice: Annotated[bool, typer.Option("--advice/--no-advice")] = True,
    html: Html = None,
    tiny: bool = False,
    processes: Annotated[int, AT_LEAST_1] = 8,
    steps: Annotated[int, AT_LEAST_1] = 5,
    directory: Annotated[Optional[Path], typer.Option("--dir")] = None,
) -> Result:
    """Count a job's memory, messages and FLOPs, without GPUs.

    Runs one step of one rank of each kind on meta tensors. Exit code 0: the job fits its GPUs. 1: it doesn't fit.

    With --tiny, trains a shrunk recipe with the same kinds of parallelism, callbacks, data module, logger and checkpoints.

    Args:
        headroom: Fraction of GPU memory that must stay free.
        kernels: 'te': layers of Transformer Engine. 'plain': plain PyTorch layers.
        all_stages: Rehearse a rank of every pipeline stage instead of three stages.
        advice: If the job doesn't fit, search for the smallest change that makes it fit.
        html: Also write an HTML page with figures.
        tiny: Shrink the recipe and train it on CPU processes of this machine.
        processes: With --tiny: maximum number of processes; the layout needs 1 to 16.
        steps: With --tiny: number of optimizer steps.
        directory: With --tiny: directory for all runs.

    Example: nemo2 rehearse llama31_405b --gpus H100x1152 strategy.pipeline_model_parallel_size=9
    """
    not_with("tiny", "headroom", "kernels", "all_stages", "advice", "as_json", "html")
    only_with("tiny", "processes", "steps", "directory")
    if not tiny:
        # Set before torch is imported. The rehearsal replaces parts of torch.cuda, which must not affect a real GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    recipe = recipe_on(name, overrides, options=options)
    if tiny:
        return _train_tiny(recipe, name, processes=processes, steps=steps, directory=directory)
    from nemo2.preflight.rehearse.job import rehearse as run
    from nemo2.preflight.rehearse.text import render

    kind = kind_of(options.gpus) or DEFAULT
    result = run(recipe, name=name, gpus=kind, headroom=headroom, kernels=kernels, all_stages=all_stages, advice=advice)
    text = render(result)
    if html is not None:
        from nemo2.preflight.rehearse.page import render_page

        write_file(html, render_page(result))
        text += f"\npage: {html}"
    return Result(result.to_dict(), text, int(not result.verdict.fits))


def _train_tiny(recipe: Any, name: str, *, processes: int, steps: int, directory: Optional[Path]) -> Result:
    from nemo2.launch import launch
    from nemo2.preflight.rehearse.shrink import shrink

    small = shrink(recipe, max_processes=processes, steps=steps)
    small.recipe.log.name = f"{name_of_run(name, recipe)}_tiny"
    small.recipe.resume.resume_if_exists = False  # every rehearsal starts anew
    if directory is not None:
        small.recipe.log.log_dir = str(directory)
    for note in small.notes:
        print(f"note: {note}")
    print(
        f"{name}, shrunk: {steps} step{'s' * (steps > 1)} on {small.processes} CPU process{'es' * (small.processes > 1)}"
    )
    launch(small.recipe, "local", devices=small.processes)
    return Result(None)
