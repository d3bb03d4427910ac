# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show-layout``: which rank holds what of a recipe, and what its pipeline does when."""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from nemo2.cli.sources import Overrides, RecipeName, configured

LAYOUT_EXAMPLE = "Example: nemo2 show-layout llama3_70b --world-size 1152 --output layout.html"


def register(app: typer.Typer) -> None:
    app.command("show-layout", epilog=LAYOUT_EXAMPLE)(show_layout)


def show_layout(
    name: RecipeName,
    overrides: Overrides = None,
    world_size: Annotated[
        Optional[int], typer.Option("--world-size", "--gpus", min=1, help="GPUs in all; else what the recipe asks for.")
    ] = None,
    microbatches: Annotated[
        Optional[int], typer.Option(min=1, help="Micro-batches per step; else from the recipe's batch sizes.")
    ] = None,
    backward: Annotated[float, typer.Option(min=0, help="Time of a backward pass; a forward pass takes 1.")] = 2.0,
    rank: Annotated[Optional[int], typer.Option(min=0, help="Only what this rank is and holds.")] = None,
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="A page (.html) or picture (.svg) to write.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Ranks, groups, layers and timeline as JSON.")] = False,
) -> None:
    """Show which rank holds what, and the pipeline's timeline: as text, page or picture."""
    from nemo2.errors import ConfigError

    if output is not None and output.suffix not in (".html", ".svg"):
        raise ConfigError(f"--output {output}: must end in .html for a page or .svg for a picture.")
    from nemo2.pictures.layout_page import draw, layout_json, layout_page, layout_text, view
    from nemo2.pictures.ranks import place_recipe
    from nemo2.settle import Machine, on

    recipe = on(configured(name, overrides or []), Machine())
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
        print(json.dumps(layout_json(shown)))
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
        raise ConfigError(f"--rank {rank}: the world has ranks 0 to {placement.world_size - 1}.")
    lines = [describe_rank(placement, rank)]
    for kind, words in GROUP_NAMES.items():
        group = placement.group_of(kind, rank)
        if len(group) > 1 and (placement.num_experts or kind not in ("etp", "ep", "expert_dp")):
            lines.append(f"{words} group: {ranks_text(group)}")
    return "\n".join(lines)
