# SPDX-License-Identifier: Apache-2.0
"""A recipe's layout as one picture, one page or JSON: ranks, layers, experts, groups and the pipeline's timeline."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.pipeline_schedule import Timeline, schedule_of, timeline
from nemo2.report.pictures.page import cards, figure, page, paragraph, section, table
from nemo2.report.pictures.pipeline import draw_timeline
from nemo2.report.pictures.placement import draw_depth, draw_experts, draw_ranks
from nemo2.report.pictures.ranks import Placement
from nemo2.report.pictures.svg import Canvas, stack
from nemo2.report.pictures.terminal import placement_text, ranks_text, timeline_text


@dataclass(frozen=True, kw_only=True)
class LayoutView:
    """A placement with its pipeline, from which the pictures of a recipe are drawn."""

    placement: Placement
    whole: Optional[Timeline]
    """The timeline of a whole step. None: there is one stage, or a step is impossible. `note` has the reason."""
    drawn: Optional[Timeline]
    """The timeline to draw, with as many micro-batches as are legible. None if `whole` is None."""
    note: str = ""
    """The caption of the timeline."""


def view(
    recipe: Any, placement: Placement, *, num_microbatches: Optional[int] = None, backward: float = 2.0
) -> LayoutView:
    """Add the pipeline's timeline to a placement.

    Args:
        recipe: The recipe, which defines the batch sizes and the order of the schedule.
        placement: The placement of the recipe's layers.
        num_microbatches: Micro-batches per step. None: the recipe's global batch over micro-batch size and replicas.
        backward: The time of a backward, relative to a forward.

    Raises:
        ConfigError: Megatron-Core would reject ``num_microbatches``.
    """
    if len(placement.stages) == 1:
        return LayoutView(placement=placement, whole=None, drawn=None, note="one stage, so there is no pipeline")
    strategy = recipe.trainer.strategy
    count = num_microbatches
    if count is None:
        data = recipe.data
        batch, micro, replicas = data.global_batch_size, data.micro_batch_size, placement.replicas
        if left := batch % (micro * replicas):
            multiples = [batch - left, batch - left + micro * replicas]
            note = (
                f"No timeline: data.global_batch_size={batch} is not a multiple of micro_batch_size * replicas = "
                f"{micro} * {replicas} = {micro * replicas}; nearest: {' or '.join(str(one) for one in multiples if one)}."
            )
            return LayoutView(placement=placement, whole=None, drawn=None, note=note)
        count = batch // (micro * replicas)
    weights = [[float(len(chunk.layers) + chunk.mtp_layers) for chunk in stage] for stage in placement.stages]
    # The embedding and the loss count as a layer if Megatron-Core counts them as a layer.
    weights[0][0] += bool(strategy.account_for_embedding_in_pipeline_split)
    weights[-1][-1] += bool(strategy.account_for_loss_in_pipeline_split)
    try:
        schedule = schedule_of(recipe, chunks=[len(stage) for stage in placement.stages], num_microbatches=count)
    except ConfigError as error:
        if num_microbatches is not None:
            raise
        return LayoutView(placement=placement, whole=None, drawn=None, note=f"No timeline: {error}")
    whole = drawn = timeline(schedule, backward=backward, weights=weights)
    legible = schedule.legible
    note = (
        f"backward {backward:g} times as long as forward; a chunk's time goes with its layers; transfers take no time"
    )
    if legible != schedule:
        drawn = timeline(legible, backward=backward, weights=weights)
        note = f"{legible.num_microbatches} of {count:,} micro-batches; idle times of the whole step; {note}"
    return LayoutView(placement=placement, whole=whole, drawn=drawn, note=note)


def summary(one: LayoutView) -> str:
    """One sentence about the pipeline of a whole step."""
    if one.whole is None:
        return one.note
    schedule = one.whole.schedule
    return (
        f"{schedule.name}: {schedule.pp} stages, {schedule.num_microbatches:,} micro-batches, bubble "
        f"{one.whole.bubble_fraction:.1%} of the time ({one.whole.bubble_overhead:.1%} on top of the work)"
    )


def draw(one: LayoutView) -> Canvas:
    """All pictures of a layout, stacked vertically."""
    pictures = [draw_depth(one.placement), draw_ranks(one.placement)]
    if one.placement.num_experts:
        pictures.append(draw_experts(one.placement))
    if one.drawn is not None:
        pictures.append(_draw_step(one, one.drawn))
    return stack(pictures, title=f"layout of {one.placement.name}".strip())


def layout_page(one: LayoutView) -> str:
    """The layout as an HTML page."""
    placement = one.placement
    figures = [
        (f"{placement.world_size:,}", f"ranks on {placement.nodes:,} nodes of {placement.gpus_per_node}"),
        (f"{placement.replicas:,}", "replicas of the model"),
        (f"{placement.world_size // placement.replicas:,}", "ranks per replica"),
    ]
    if one.whole is not None:
        figures.append(
            (f"{one.whole.bubble_fraction:.1%}", "of a step in the pipeline's bubble (mean idle time of the stages)")
        )
    held = [figure(draw_depth(placement).render(), "Layers"), figure(draw_ranks(placement).render(), "Ranks")]
    if placement.num_experts:
        held.append(figure(draw_experts(placement).render(), "Experts"))
    if one.drawn is not None and one.whole is not None:
        picture = figure(_draw_step(one, one.drawn).render(), "One step")
        whole = f"A whole step, {one.whole.schedule.num_microbatches:,} micro-batches:"
        pipeline = section("Pipeline", picture, paragraph(whole), _orders(one.whole))
    else:
        pipeline = section("Pipeline", paragraph(one.note))
    rows = [
        (name, len(groups[0]), len(groups), placement.nodes_spanned(kind), ranks_text(groups[0]))
        for kind, name in placement.kinds.items()
        for groups in [placement.groups[kind]]
    ]
    groups = section(
        "Groups",
        table(("kind", "ranks per group", "groups", "nodes per group, at most", "first group"), rows),
        paragraph(f"Order of the dimensions in rank numbers, fastest first: {placement.order.replace('-', ', ')}."),
    )
    return page(
        f"Layout of {placement.name}",
        cards(figures),
        section("Placement", *held),
        pipeline,
        groups,
        subtitle=placement.layout.describe(placement.world_size),
    )


def layout_text(one: LayoutView, *, width: int = 100, colour: bool = False) -> str:
    """The layout on a terminal."""
    parts = [placement_text(one.placement), "", summary(one)]
    if one.drawn is not None:
        parts += [one.note, timeline_text(one.drawn, width=width, colour=colour)]
    return "\n".join(parts)


def layout_json(one: LayoutView) -> dict[str, Any]:
    """The contents of the pictures as plain data."""
    placement, layout = one.placement, one.placement.layout
    facts: dict[str, Any] = {
        "name": placement.name,
        "world_size": placement.world_size,
        "gpus_per_node": placement.gpus_per_node,
        "order": placement.order,
        "layout": dataclasses.asdict(layout) | {"dp": placement.replicas},
        "stages": [
            [dataclasses.asdict(chunk) | {"layers": list(chunk.layers)} for chunk in stage]
            for stage in placement.stages
        ],
        "groups": {kind: [list(group) for group in groups] for kind, groups in placement.groups.items()},
        "note": one.note,
        "pipeline": None,
    }
    if one.whole is not None:
        facts["pipeline"] = {
            "schedule": one.whole.schedule.name,
            "num_microbatches": one.whole.schedule.num_microbatches,
            "bubble_fraction": one.whole.bubble_fraction,
            "bubble_overhead": one.whole.bubble_overhead,
            "activations_in_flight": [one.whole.in_flight(rank) for rank in range(len(one.whole.slots))],
            "passes": [
                [
                    {
                        "kind": "forward" if slot.work.forward else "backward",
                        "chunk": slot.work.chunk,
                        "microbatch": slot.work.microbatch,
                        "phase": slot.work.phase,
                        "start": slot.start,
                        "end": slot.end,
                    }
                    for slot in row
                ]
                for row in one.whole.slots
            ],
        }
    return facts


def _draw_step(one: LayoutView, drawn: Timeline) -> Canvas:
    """A drawing of as many micro-batches as are legible, with the idle time and the activations of the whole step."""
    return draw_timeline(drawn, title=summary(one), note=one.note, measured=one.whole)


def _orders(whole: Timeline) -> str:
    rows = []
    for rank, row in enumerate(whole.slots):
        passes = Counter(slot.work.phase for slot in row)
        counts = (passes[phase] for phase in ("warm-up", "steady", "drain"))
        rows.append((rank, *counts, whole.in_flight(rank), f"{whole.idle_fraction(rank):.1%}"))
    head = ("stage", "warm-up passes", "steady passes", "drain passes", "activations in flight, at most", "idle")
    return table(head, rows)
