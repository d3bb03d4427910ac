# SPDX-License-Identifier: Apache-2.0
"""``nemo2 list``: lists the recipes."""

import fnmatch
import re
import sys
from typing import Annotated, Any, Optional

import typer

from nemo2.base.columns import columns
from nemo2.base.counts import short_count
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import DEFAULT, GIB, HEADROOM, NAMES, answer_of, gpu, parse_gpus
from nemo2.base.names import did_you_mean
from nemo2.cli.adapter import AT_LEAST_1, Result
from nemo2.cli.flags import number_of
from nemo2.cli.sources import FINETUNING

_COLUMNS = ("name", "family", "parameters", "gpus", "GiB", "layout", "seq", "precision")
_RIGHT = ("parameters", "gpus", "GiB", "seq")
_FIRST_TO_GO = ("precision", "seq", "family")
SHIPPED = "shipped"


def list_recipes(
    pattern: Optional[str] = None,
    *,
    family: Optional[str] = None,
    max_gpus: Annotated[Optional[int], AT_LEAST_1] = None,
    min_params: Optional[str] = None,
    max_params: Optional[str] = None,
    precision: Optional[str] = None,
    layout: Optional[str] = None,
    origin: Annotated[Optional[bool], typer.Option("--own/--shipped")] = None,
    finetune: bool = False,
    fits: Optional[str] = None,
) -> Result:
    """List all recipes, also your own, with size, GPUs and layout.

    Prints the number of parameters with the released vocabulary, the number of GPUs, the memory of the fullest GPU and
    the layout.

    Args:
        pattern: Only recipes whose name or family contains this text, or matches it (with * and ?).
        family: Only this model family; same syntax as PATTERN.
        max_gpus: Only recipes for at most this many GPUs.
        min_params: Only models with at least this many parameters, such as 7B.
        max_params: Only models with at most this many parameters.
        precision: Only this precision, such as bf16; same syntax as PATTERN.
        layout: Only layouts with these sizes: 'pp cp=2' is any pipeline size above 1 and context size 2.
        origin: Only your own recipes, or only the recipes that nemo2 ships.
        finetune: List fine-tuning recipes, each with LoRA and with all parameters.
        fits: Only recipes that fit GPUs with this memory (24GB, or a GPU such as A100-40), by their rehearsal.

    Example: nemo2 list 'llama3*' --max-gpus 64
    """
    if layout is not None:
        _refuse_unknown_sizes(layout)
    memory = gpu(DEFAULT).memory if fits is None else memory_of(fits)
    forms = "a number of parameters, such as 7B or 350M"
    least = None if min_params is None else number_of(min_params, option="--min-params", forms=forms)
    most = None if max_params is None else number_of(max_params, option="--max-params", forms=forms)
    rows, problems = _rows(own=origin is not False, shipped=origin is not True, finetune=finetune)
    for item in rows:
        peak = _rehearsed_peak(item)
        item["peak_gib"] = None if peak is None else round(peak / GIB, 1)
        # Without --fits, for the GPU that the recipes are laid out for.
        item["memory"] = None if peak is None else answer_of(peak, memory)
    matching = [
        item
        for item in rows
        if (pattern is None or matches(pattern, item["name"]) or matches(pattern, item["family"]))
        and (family is None or matches(family, item["family"]))
        and (max_gpus is None or item["gpus"] <= max_gpus)
        and within(item["parameters"], least, most)
        and (precision is None or matches(precision, item["precision"]))
        and (layout is None or has_layout(item["layout"], layout))
        and (fits is None or item["memory"] == "fits")
    ]
    for problem in problems:
        print(f"not listed: {problem}", file=sys.stderr)
    if not matching and len(rows) > 0:
        if pattern is None:
            raise ConfigError("No recipe passes all filters: leave one of them out.")
        raise ConfigError(f"No recipe matches {pattern!r}{did_you_mean(pattern, [item['name'] for item in rows])}")
    none = "You have no recipes of your own. `nemo2 new-recipe NAME --from RECIPE` creates one."
    legend = f"\n! leaves less than {HEADROOM:.0%} of an {DEFAULT}'s {memory / GIB:.0f} GiB free"
    text = table(matching) + (legend if {one["memory"] for one in matching} - {"fits", None} else "")
    return Result(matching, text if matching or problems else none)


def _rows(*, own: bool, shipped: bool, finetune: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each recipe, and a line for each of the user's recipes that can't be read."""
    from nemo2 import recipes

    rows = [fact for name in recipes.names() for fact in _of_facts(recipes.get(name), finetune)] if shipped else []
    if not own:
        return rows, []
    sources, problems = recipes.own()
    for name, source in sorted(sources.items()):
        try:
            recipe = source.load()
            own_rows = _of_facts(recipe, finetune)
            if not own_rows and not finetune and hasattr(recipe.home, "pretrain_recipe"):
                own_rows = [row_of_tree(recipe.pretrain_recipe())]
        except ConfigError as error:  # one broken recipe must not hide the others
            problems.append(f"{name}: {error}")
        else:
            for item in own_rows:
                method = str(item.get("name", "")).partition(":")[2]
                rows.append({**item, "name": f"{name}:{method}" if method else name, "origin": source.origin})
    return rows, problems


def _rehearsed_peak(item: dict[str, Any]) -> Optional[int]:
    """The bytes on the fullest GPU of a shipped recipe. None: nobody has rehearsed it."""
    from nemo2.preflight.planner.peaks import rehearsed
    from nemo2.preflight.rehearse.counts import peak_of

    shipped = rehearsed().get(item["name"]) if item["origin"] == SHIPPED else None
    return None if shipped is None else peak_of(shipped["ranks"])


def memory_of(text: str) -> float:
    """The bytes of a GPU's memory: of a GPU of nemo2's table, or ``24GB`` as GPUs are sold.

    Torch sees less than a GPU is sold with: of the table's GPUs that are sold with this memory, the one with the least
    counts.

    Raises:
        ConfigError: it is neither.
    """
    if size := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GI?B?)?", text.strip().upper()):
        sold = float(size[1]) * GIB
        return min((seen for name in NAMES if 0.9 * sold <= (seen := gpu(name).memory) <= sold), default=sold)
    return parse_gpus(text, option="--fits", also="or a memory such as 24GB")[0].memory


def _of_facts(recipe: Any, finetune: bool) -> list[dict[str, Any]]:
    """The rows of a module from its facts. Empty: it has no facts."""
    if finetune:
        facts = getattr(recipe, "FINETUNE", None)
        return [] if facts is None else [row_of_finetuning(facts, method) for method in ("lora", "full")]
    return [] if recipe.RECIPE is None else [row(recipe.RECIPE)]


def row(recipe: Any) -> dict[str, Any]:
    """The row of ``nemo2 list`` for a recipe's facts."""
    return {
        "name": recipe.name,
        "family": recipe.family,
        "parameters": int(recipe.parameters),
        "gpus": recipe.nodes * recipe.gpus_per_node,
        "layout": layout_text(recipe.layout),
        "seq": recipe.seq_length,
        "precision": recipe.precision.rpartition(":")[2],
        "origin": SHIPPED,
    }


def row_of_finetuning(facts: Any, method: str) -> dict[str, Any]:
    """The row of ``nemo2 list --finetune`` for a recipe. ``method``: the word behind the name on the command line."""
    on = facts.on(FINETUNING[method])
    return {
        **row(facts.of),
        "name": f"{facts.name}:{method}",
        "gpus": on.nodes * on.gpus_per_node,
        "layout": layout_text(on),
        "seq": facts.seq_length,
        "precision": facts.precision.rpartition(":")[2],
    }


def row_of_tree(recipe: Any) -> dict[str, Any]:
    """The row of a recipe without facts, read from its tree. ``parameters`` is None if the tree doesn't tell their
    number."""
    from nemo2.mcore.parallel.layout import Layout
    from nemo2.mcore.settle import Machine, world_of
    from nemo2.preflight.planner.size import size_of

    strategy, trainer, plugin = recipe.trainer.strategy, recipe.trainer, recipe.trainer.plugins
    size = size_of(recipe, Machine())
    return {
        "family": recipe.model.__fn_or_cls__.__name__.removesuffix("Model"),
        "parameters": None if size is None else size.parameters,
        "gpus": world_of(trainer, Machine()).size,
        "layout": layout_text(Layout.of(strategy)),
        "seq": recipe.data.seq_length,
        "precision": str(getattr(plugin, "precision", None) or trainer.precision or "32"),
    }


def layout_text(layout: Any) -> str:
    """``tp=2 pp=4 vp=5 sp``: the differences from plain data parallelism; ``dp`` if there are none."""
    from nemo2.mcore.parallel.layout import SIZE_FIELDS

    parts = [f"{name}={value}" for name in SIZE_FIELDS if (value := getattr(layout, name)) not in (1, None)]
    return " ".join([*parts, "sp"] if layout.sp else parts) or "dp"


def _gib(item: dict[str, Any]) -> str:
    return "-" if item["peak_gib"] is None else f"{item['peak_gib']:.0f}{'' if item['memory'] == 'fits' else '!'}"


def within(count: Optional[int], least: Optional[float], most: Optional[float]) -> bool:
    """Whether a count is within the limits. An unknown count is within none."""
    if count is None:
        return least is None and most is None
    return (least is None or count >= least) and (most is None or count <= most)


def _refuse_unknown_sizes(layout: str) -> None:
    from nemo2.mcore.parallel.layout import SIZE_FIELDS

    names = [*SIZE_FIELDS, "sp", "dp"]
    for word in layout.lower().replace(",", " ").split():
        name, equals, size = word.partition("=")
        if name not in names or (equals and not size.isdigit()):
            raise ConfigError(
                f"--layout {layout!r}: {word!r} is not a size such as pp or cp=2{did_you_mean(name, names)}"
                if name not in names
                else f"--layout {layout!r}: {word!r}: a size is a whole number, such as {name}=2."
            )


def has_layout(layout: str, wanted: str) -> bool:
    """Whether the text of a layout has every word of ``wanted``: ``pp`` is any size but 1, ``pp=4`` this size."""
    parts = layout.split()
    sizes = {part.partition("=")[0] for part in parts}
    return all(word in parts or word in sizes for word in wanted.lower().replace(",", " ").split())


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches, ignoring case. A pattern without wildcards may occur anywhere."""
    pattern, text = pattern.lower(), text.lower()
    return fnmatch.fnmatchcase(text, pattern) if any(c in pattern for c in "*?[") else pattern in text


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns, with a bold header on a terminal. If a recipe is the user's own, the last column names its
    origin.

    GiB is the rehearsed peak of the fullest GPU; "!" marks a peak that leaves less than `HEADROOM` free.
    """
    texts = [{**item, "parameters": short_count(item["parameters"]), "GiB": _gib(item)} for item in rows]
    shown = [*_COLUMNS, *(["origin"] if any(item["origin"] != SHIPPED for item in rows) else [])]
    cells = [[item[name] for name in shown] for item in texts]
    right, folds = map(shown.index, _RIGHT), shown.index("layout")
    colours = sys.stdout.isatty()
    return "\n".join(columns(cells, head=shown, right=right, folds=folds, optional=_FIRST_TO_GO, colours=colours))
