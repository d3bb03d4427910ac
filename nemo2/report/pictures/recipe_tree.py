# SPDX-License-Identifier: Apache-2.0
"""Draws a recipe: a box for each config with the fields that it sets, joined to the configs inside it."""

from pathlib import Path
from typing import Any

import fiddle as fdl

from nemo2.base.errors import ConfigError
from nemo2.base.files import write_file
from nemo2.config.show import Branch, effective_children, holds_configs, qualified_name, shown_value, tree
from nemo2.report.pictures.page import figure, page
from nemo2.report.pictures.svg import Canvas, standalone, text_width

SUFFIXES = (".svg", ".html")

_LINE, _HEAD, _PAD, _GAP, _BETWEEN, _EDGE = 17, 24, 9, 14, 54, 16
"""Heights of a row and of a title, and distances, in pixels."""
_MOST = 44
"""The largest number of characters shown of a value. The whole value appears under the pointer."""


_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "seq_length",
    "q_lora_rank", "kv_lora_rank", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "mamba_num_heads", "mtp_num_layers",
)  # fmt: skip
"""The fields of a model's config that define its size."""


def write_picture(recipe: Any, path: Path, *, title: str, defaults: bool = False) -> Path:
    """Draw a recipe into a file in the format of its suffix (`SUFFIXES`), and return the path. An existing file is replaced.

    With ``defaults`` the picture also shows unset fields.

    Raises:
        ConfigError: the suffix is unknown.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the suffix of a picture must be one of {', '.join(SUFFIXES)}.")
    picture = draw(tree(recipe, defaults=defaults), title).render()
    if path.suffix == ".svg":
        return write_file(path, standalone(picture))
    caption = "Each box is a config with the fields that it sets."
    return write_file(path, page(title, figure(picture, caption, natural_size=True), wide=True))


def draw(root: Branch, title: str) -> Canvas:
    """The recipe's configs as boxes from left to right, each next to the boxes of the configs inside it.

    A config in two places is a box at the first and a name at the second. A model's sizes are shown even if they are
    defaults of its class.
    """
    columns: list[float] = []

    def measure(box: Branch, depth: int) -> None:
        columns.extend([0.0] * (depth + 1 - len(columns)))
        columns[depth] = max(columns[depth], _width(box))
        for _, one in rows_of(box):
            if is_box(one):
                measure(one, depth + 1)

    measure(root, 0)
    starts = [_EDGE + sum(width + _BETWEEN for width in columns[:depth]) for depth in range(len(columns))]
    canvas = Canvas(starts[-1] + columns[-1] + _EDGE, 0, title=title)

    def place(box: Branch, name: str, part: int, depth: int, top: float) -> tuple[float, float]:
        """Draw a box and all boxes inside it from ``top`` down. Returns the heights of its title and of the lower end.
        ``part`` is the index of the recipe's part, which has a color of its own; -1 for the recipe."""
        end, joints, rows = top, {}, rows_of(box)
        for number, (label, one) in enumerate(rows):
            if is_box(one):
                joints[number], end = place(one, label, number if part < 0 else part, depth + 1, end)
                end += _GAP
        end = end - _GAP if joints else end
        height = _HEAD + (len(rows) * _LINE + 8 if rows else 0)
        y = max(top, min((top + end - height) / 2, next(iter(joints.values()), top) - _HEAD / 2)) if joints else top
        x, width = starts[depth], _width(box)
        canvas.rect(x, y, width, height, "card", radius=5, outline="edge")
        canvas.rect(x, y, width, _HEAD, f"c{part % 7}" if part >= 0 else "c7", radius=5)
        canvas.text(x + _PAD, y + 16, _title(box), "ink", strong=True, tip=f"{name}: {_title(box)}")
        for number, (label, one) in enumerate(rows):
            middle = y + _HEAD + 4 + number * _LINE + 12
            canvas.text(x + _PAD, middle, label, "soft")
            if number not in joints:
                # Right-aligned, because the drawn width of the label isn't known exactly.
                text, tone = text_of(one), "soft" if one.default else "ink"
                canvas.text(x + width - _PAD, middle, _cut(text), tone, anchor="end", tip=text)
            else:
                # Straight to the column of elbows, vertically along it, and on to the title of the box.
                elbow = starts[depth + 1] - _BETWEEN / 2
                canvas.line(x + width, middle - 4, elbow, middle - 4, "soft")
                canvas.line(elbow, middle - 4, elbow, joints[number], "soft")
                canvas.line(elbow, joints[number], starts[depth + 1], joints[number], "soft")
        return y + _HEAD / 2, max(end, y + height)

    _, canvas.height = place(root, "recipe", -1, 0, _EDGE)
    canvas.height += _EDGE
    return canvas


def rows_of(box: Branch) -> list[tuple[str, Branch]]:
    """The fields of a config with their labels. Lists and dicts with configs yield their items."""

    def spread(label: str, one: Branch) -> list[tuple[str, Branch]]:
        if isinstance(one.value, fdl.Buildable) or not holds_configs(one.value):
            return [(label, one)]
        return [row for below in one.inside for row in spread(f"{label}{below.step}", below)]

    return [row for one in (*_sizes(box), *box.inside) for row in spread(one.label, one)]


def is_box(one: Branch) -> bool:
    return isinstance(one.value, fdl.Buildable) and not one.first


def text_of(one: Branch) -> str:
    """The value of a row that is no box."""
    return f"same as {one.first}" if one.first else shown_value(one.value)


def _sizes(box: Branch) -> list[Branch]:
    """The unset sizes of a model's config, whose values are its class's. Empty for other configs."""
    values = dict(effective_children(box.value, defaults=True))
    if not {".num_layers", ".hidden_size"} <= values.keys():
        return []
    names = [name for name in _SIZES if values.get(".num_moe_experts") or not name.startswith("moe_")]
    shown = {one.step for one in box.inside}
    sizes = [(f".{name}", values.get(f".{name}")) for name in names if f".{name}" not in shown]
    return [Branch(step=step, value=value, default=True) for step, value in sizes if isinstance(value, int) and value]


def _title(box: Branch) -> str:
    return qualified_name(box.value.__fn_or_cls__).rpartition(".")[2]


def _width(box: Branch) -> float:
    rows = [
        text_width(label) + (0 if is_box(one) else 18 + text_width(_cut(text_of(one)))) for label, one in rows_of(box)
    ]
    return max([text_width(_title(box)) * 1.25, *(width * 1.04 for width in rows)]) + 2 * _PAD


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
