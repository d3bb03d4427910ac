# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show-layout``: the parts of the model on each rank, the process groups, and the pipeline's timeline."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from nemo2.cli.commands import not_with
from nemo2.cli.flags import AsJson, Devices, Gpus, Nodes, Performance, machine_of, print_json, recipe_on
from nemo2.cli.own_data import Data
from nemo2.cli.sources import Overrides, RecipeName

LAYOUT_EXAMPLE = "Example: nemo2 show-layout llama3_70b --gpus 1152 --output layout.html"


def register(app: typer.Typer) -> None:
    app.command("show-layout", epilog=LAYOUT_EXAMPLE)(show_layout)


def show_layout(
    name: RecipeName,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    devices: Devices = None,
    performance: Performance = False,
    data: Data = None,
    world_size: Annotated[
        Optional[int], typer.Option("--world-size", min=1, help="Number of ranks, even if they don't fill whole nodes.")
    ] = None,
    microbatches: Annotated[
        Optional[int], typer.Option(min=1, help="Micro-batches per step. Default: from the recipe's batch sizes.")
    ] = None,
    backward: Annotated[
        float, typer.Option(min=0, help="Duration of a backward pass, relative to a forward pass.")
    ] = 2.0,
    rank: Annotated[
        Optional[int], typer.Option(min=0, help="Print only the position and contents of this rank.")
    ] = None,
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="HTML page (.html) or figure (.svg) to write.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers each rank holds, the process groups, and the pipeline's timeline."""
    from nemo2.errors import ConfigError

    not_with("rank", "microbatches", "backward", "output", "as_json")
    not_with("world_size", "gpus", "nodes", "devices")
    if output is not None and output.suffix not in (".html", ".svg"):
        raise ConfigError(f"--output {output}: must end in .html or .svg.")
    from nemo2.pictures.layout_page import draw, layout_json, layout_page, layout_text, view
    from nemo2.pictures.ranks import place_recipe
    from nemo2.settle import on

    recipe = recipe_on(name, overrides, gpus=gpus, nodes=nodes, devices=devices, performance=performance, data=data)
    recipe = on(recipe, machine_of(gpus))
    placement = place_recipe(recipe, name=name, world_size=world_size)
    if rank is not None:
        print(_one_rank(placement, rank))
        return
    shown = view(recipe, placement, num_microbatches=microbatches, backward=backward)
    if output is not None:
        from nemo2.pictures.svg import standalone

        text = layout_page(shown) if output.suffix == ".html" else standalone(draw(shown).render())
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    if as_json:
        print_json(layout_json(shown), on_a_line=True)
    elif output is not None:
        print(output)
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((120, 24)).columns
        print(layout_text(shown, width=width, colour=terminal))


def _one_rank(placement: object, rank: int) -> str:
    from nemo2.errors import ConfigError
    from nemo2.pictures.placement import describe_rank
    from nemo2.pictures.ranks import GROUP_NAMES, Placement
    from nemo2.pictures.terminal import ranks_text

    assert isinstance(placement, Placement)
    if rank >= placement.world_size:
        raise ConfigError(f"--rank {rank}: must be 0 to {placement.world_size - 1}, the ranks of this layout.")
    lines = [describe_rank(placement, rank)]
    for kind, words in GROUP_NAMES.items():
        group = placement.group_of(kind, rank)
        if len(group) > 1 and (placement.num_experts or kind not in ("etp", "ep", "expert_dp")):
            lines.append(f"{words} group: {ranks_text(group)}")
    return "\n".join(lines)
