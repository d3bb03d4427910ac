# SPDX-License-Identifier: Apache-2.0
"""A search for layouts as one HTML page: all that fit as a scatter plot, the best as a table."""

from nemo2.config.overrides import in_shell
from nemo2.pictures import Point, page, scatter_chart
from nemo2.pictures.page import cards, figure, paragraph, section, table
from nemo2.planner.search import Candidate, SearchResult
from nemo2.planner.text import GIB, seconds

MOST_POINTS = 400


def render_page(found: SearchResult, *, title: str) -> str:
    """The page as text."""
    best = found.best[0]
    glance = [
        (f"{best.speed:,.0f}", "tokens/s per GPU, fastest layout"),
        (f"{best.speed / found.unchanged.speed - 1:+.0%}", "speed compared with the unchanged recipe"),
        (str(len(found.tried)), f"of {found.number_tried} configurations searched fit in memory"),
    ]
    return page(
        f"Layouts of {title}",
        cards(glance),
        section(
            "Memory and speed",
            figure(scatter(found).render(), "Layouts that fit: lower is faster, further left needs less memory"),
        ),
        section("Fastest layouts", _table(found)),
        *(paragraph(f"{one.layout.describe(one.job.gpus)}: {_changes(one)}") for one in found.best),
    )


def scatter(found: SearchResult):
    """Step time over memory of the layouts that fit, colored by tensor-parallel size. The best carry their rank."""
    best = {id(one.step): rank for rank, one in enumerate(found.best, 1)}
    points = [
        Point(
            x=one.needed / GIB,
            y=one.step.total,
            group=f"TP {one.layout.tp}",
            label=f"{best[id(one.step)]}" if id(one.step) in best else "",
            tip=_describe(one),
        )
        for one in sorted(found.tried[:MOST_POINTS], key=lambda one: one.layout.tp)
    ]
    return scatter_chart("Layouts that fit", points, x_label="GiB on a GPU", y_label="seconds per step", frontier=True)


def _table(found: SearchResult) -> str:
    rows = [
        [str(rank), _describe(one), f"{one.speed:,.0f}", seconds(one.step.total), f"{one.needed / GIB:.1f}", one.why]
        for rank, one in enumerate(found.best, 1)
    ]
    unchanged = found.unchanged
    rows.append(
        [
            "–",
            f"unchanged: {_describe(unchanged)}",
            f"{unchanged.speed:,.0f}",
            seconds(unchanged.step.total),
            f"{unchanged.needed / GIB:.1f}",
            "",
        ]
    )
    return table(["", "layout", "tokens/s per GPU", "step", "GiB", "why"], rows)


def _changes(one: Candidate) -> str:
    return in_shell(one.overrides) if one.overrides else "the unchanged recipe"


def _describe(one: Candidate) -> str:
    recompute = "" if one.job.recompute == "none" else f", {one.job.recompute} recomputation"
    return f"{one.layout.describe(one.job.gpus)}, micro-batch {one.job.micro_batch}{recompute}"
