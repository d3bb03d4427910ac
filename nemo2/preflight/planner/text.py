# SPDX-License-Identifier: Apache-2.0
"""A plan as text for a terminal."""

from nemo2.base.columns import columns, folded
from nemo2.base.gpus import GIB
from nemo2.config.overrides import in_shell
from nemo2.preflight.planner.error_band import Band
from nemo2.preflight.planner.plan import Plan
from nemo2.preflight.planner.search import SearchResult


def render(plan: Plan) -> str:
    """The plan's speed with its band, the parts of a step's time, memory, notes and budget."""
    job = plan.job
    lines = [
        folded(
            f"{plan.recipe or 'recipe'} on {plan.gpus} x {plan.gpu.name}: {plan.layout}, {job.precision}, sequence "
            f"{job.seq}, micro-batch {job.micro_batch}, global batch {job.global_batch}"
        ),
        "",
        *speed_lines(plan),
        "",
        *step_table(plan),
        "",
        *memory_table(plan),
        *(folded(f"note: {note}") for note in plan.notes),
    ]
    return "\n".join([*lines, *(["", *map(folded, budget_lines(plan))] if plan.tokens is not None else [])])


def speed_lines(plan: Plan) -> list[str]:
    """The predicted speeds. Tokens per second and the step's time have the band's range."""
    speed, low, high = plan.tokens_per_second_per_gpu, plan.band.low, plan.band.high
    basis, step = band_words(plan.band), plan.step.total
    rows = [
        ("tokens/s per GPU", f"{speed:,.0f}  ({low * speed:,.0f} to {high * speed:,.0f}: {basis})"),
        (
            "MFU",
            f"{plan.mfu:.1%}  with causal attention FLOPs, {plan.mfu_full_attention:.1%} with full attention FLOPs, of "
            f"{plan.gpu.rate(plan.job.precision) / 1e12:,.0f} TFLOP/s",
        ),
        (
            "TFLOP/s per GPU",
            f"{plan.flops_per_second() / 1e12:,.0f}  ({plan.flops_per_second(causal=False) / 1e12:,.0f})",
        ),
        ("step", f"{seconds(step)}  ({seconds(step / high)} to {seconds(step / low)})"),
    ]
    return columns(rows)


def band_words(band: Band) -> str:
    """The meaning of the range after a speed."""
    if not band.borrowed:
        return f"two thirds of {band.measurements} published speeds of similar jobs ({band.kind}) lie in this band"
    number = f"only {band.measurements}" if band.measurements else "no"
    return f"the widest band of all kinds, because {number} speeds of similar jobs ({band.kind}) are published"


def step_table(plan: Plan) -> list[str]:
    """The parts of the step's time, largest first."""
    parts = sorted(plan.step.parts.items(), key=lambda item: -item[1])
    rows = [(name, seconds(value), f"{value / plan.step.total:.1%}") for name, value in parts]
    return ["where the step's time goes", *columns(rows, right=[1, 2], indent=2)]


def memory_table(plan: Plan) -> list[str]:
    """The memory's parts with a column per kind of rank, and the verdict."""
    fit = plan.fit
    names = list(dict.fromkeys(name for parts in fit.ranks.values() for name in parts))
    rows = [(f"  {name}", *(f"{parts.get(name, 0) / GIB:.2f}" for parts in fit.ranks.values())) for name in names]
    rows.append(("  total", *(f"{sum(parts.values()) / GIB:.2f}" for parts in fit.ranks.values())))
    head = ["memory, GiB", *fit.ranks]
    return [*columns(rows, head=head, right=range(1, len(head))), folded(fit.headline())]


def budget_lines(plan: Plan) -> list[str]:
    """The duration and the cost of the token budget."""
    assert plan.tokens is not None and plan.hours is not None and plan.goodput is not None
    lines = [
        f"{plan.tokens:.3g} tokens: {duration(plan.hours)} without interruptions ({plan.hours * plan.gpus:,.0f} GPU hours)",
        f"with {plan.goodput.interruptions:,.1f} expected interruptions: {duration(plan.goodput.hours)}, "
        f"{plan.goodput.share:.1%} of it useful training, with a checkpoint every {duration(plan.goodput.interval_hours)}",
    ]
    if plan.cost is not None:
        low, high = plan.cost / plan.band.high, plan.cost / plan.band.low
        lines.append(f"cost: {plan.cost:,.0f} ({low:,.0f} to {high:,.0f}) at {plan.cost_per_gpu_hour:g} per GPU hour")
    return lines


def seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


def duration(hours: float) -> str:
    """``"3.2 days"``, ``"5.1 hours"`` or ``"12 minutes"``."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"


def render_search(result: SearchResult, *, title: str) -> str:
    """The fastest layouts, each with its reason and its overrides."""
    lines = [f"{title}: {result.number_tried:,} configurations searched, {len(result.tried):,} fit"]
    for rank, one in enumerate((result.unchanged, *result.best)):
        lines += [f"{rank}: {one}" if rank else f"unchanged: {one}"]
        lines += [f"    {one.speed:,.0f} tokens/s per GPU, step {seconds(one.step.total)}, {one.needed / GIB:.1f} GiB"]
        lines += [f"    why: {one.why}", f"    {in_shell(one.overrides) or 'no override'}"] if rank else []
        lines += [""]
    lines += ["the memory of the layouts is counted by a rehearsal; that of the unchanged recipe too"]
    return "\n".join(lines)
