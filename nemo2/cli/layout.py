# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show --layout``: the parts of the model on each rank, the process groups, and the pipeline's timeline."""

import shutil
import sys
from pathlib import Path
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.base.files import write_file
from nemo2.cli.adapter import Result
from nemo2.cli.commands import not_with
from nemo2.cli.flags import machine_of


def layout_of(
    recipe: Any,
    name: str,
    gpus: Optional[str],
    *,
    world_size: Optional[int],
    rank: Optional[int],
    output: Optional[Path],
    pipeline: dict[str, Any],
) -> Result:
    """Which layers each rank holds, the process groups, and the pipeline's timeline; or one rank's place.

    Args:
        output: The page (.html) or figure (.svg) to write.
        pipeline: Further arguments of `nemo2.report.pictures.layout_page.view`.
    """
    from nemo2.mcore.settle import on
    from nemo2.report.pictures.layout_page import draw, layout_json, layout_page, layout_text, view
    from nemo2.report.pictures.ranks import place_recipe

    recipe = on(recipe, machine_of(gpus))
    placement = place_recipe(recipe, name=name, world_size=world_size)
    if rank is not None:
        not_with("rank", "microbatches", "backward", "output", "as_json")
        return Result(None, _one_rank(placement, rank))
    shown = view(recipe, placement, **pipeline)
    if output is not None:
        from nemo2.report.pictures.svg import standalone

        text = layout_page(shown) if output.suffix == ".html" else standalone(draw(shown).render())
        write_file(output, text)
        return Result(layout_json(shown), str(output))
    width = shutil.get_terminal_size((120, 24)).columns
    return Result(layout_json(shown), layout_text(shown, width=width, colour=sys.stdout.isatty()))


def _one_rank(placement: Any, rank: int) -> str:
    from nemo2.report.pictures.placement import describe_rank
    from nemo2.report.pictures.terminal import ranks_text

    if rank >= placement.world_size:
        raise ConfigError(f"--rank {rank}: must be 0 to {placement.world_size - 1}, the ranks of this layout.")
    lines = [describe_rank(placement, rank)]
    for kind, words in placement.kinds.items():
        group = placement.group_of(kind, rank)
        if len(group) > 1:
            lines.append(f"{words} group: {ranks_text(group)}")
    return "\n".join(lines)
