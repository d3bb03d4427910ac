# SPDX-License-Identifier: Apache-2.0
"""A search for layouts as one HTML page: all that fit as a scatter plot, the best as a table."""

from nemo2.base.gpus import GIB
from nemo2.config.overrides import in_shell
from nemo2.preflight.planner.search import SearchResult
from nemo2.preflight.planner.text import seconds
from nemo2.report.pictures.bars_and_points import Point, scatter_chart
from nemo2.report.pictures.page import cards, figure, page, paragraph, section, table
from nemo2.report.pictures.svg import Canvas

MOST_POINTS = 400


def render_page(result: SearchResult, *, title: str) -> str:
    """The page as text."""
    best = result.best[0]
    glance = [
        (f"{best.speed:,.0f}", "tokens/s per GPU, fastest layout"),
        (f"{best.speed / result.unchanged.speed - 1:+.0%}", "speed compared with the unchanged recipe"),
        (str(len(result.tried)), f"of {result.number_tried} configurations searched fit in memory"),
    ]
    layouts = [(str(rank), str(one), one) for rank, one in enumerate(result.best, 1)]
    layouts.append(("–", f"unchanged: {result.unchanged}", result.unchanged))
    rows = [
        [rank, layout, f"{one.speed:,.0f}", seconds(one.step.total), f"{one.needed / GIB:.1f}", one.why]
        for rank, layout, one in layouts
    ]
    caption = "Layouts that fit: lower is faster, further left needs less memory"
    return page(
        f"Layouts of {title}",
        cards(glance),
        section("Memory and speed", figure(scatter(result).render(), caption)),
        section("Fastest layouts", table(["", "layout", "tokens/s per GPU", "step", "GiB", "why"], rows)),
        *(
            paragraph(f"{one.layout.describe(one.job.gpus)}: {in_shell(one.overrides) or 'the unchanged recipe'}")
            for one in result.best
        ),
    )


def scatter(result: SearchResult) -> Canvas:
    """Step time over memory of the layouts that fit, colored by tensor-parallel size. The best carry their rank."""
    best = {id(one.step): rank for rank, one in enumerate(result.best, 1)}
    points = [
        Point(
            x=one.needed / GIB,
            y=one.step.total,
            group=f"TP {one.layout.tp}",
            label=str(best.get(id(one.step), "")),
            tip=str(one),
        )
        for one in sorted(result.tried[:MOST_POINTS], key=lambda one: one.layout.tp)
    ]
    return scatter_chart("Layouts that fit", points, x_label="GiB on a GPU", y_label="seconds per step")
