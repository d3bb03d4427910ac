# SPDX-License-Identifier: Apache-2.0
"""Draws a recipe: a box for each config with the fields that it sets, joined to the configs inside it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import fiddle as fdl

from nemo2.base.files import write_file
from nemo2.config.show import effective_children, holds_configs, qualified_name, shown_value
from nemo2.errors import ConfigError
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


@dataclass
class Box:
    """A config: its class and its rows. ``part`` is the index of the recipe's part, which has a color of its own."""

    name: str
    title: str
    part: int
    rows: list["Row"] = field(default_factory=list)


@dataclass
class Row:
    """A field: its value as text, or the box of the config in it. ``default``: whether the field is unset."""

    label: str
    value: str
    child: Optional[Box] = None
    default: bool = False


def write_picture(recipe: Any, path: Path, *, title: str, defaults: bool = False) -> Path:
    """Draw a recipe into a file in the format of its suffix (`SUFFIXES`), and return the path. An existing file is replaced.

    With ``defaults`` the picture also shows unset fields.

    Raises:
        ConfigError: the suffix is unknown.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the suffix of a picture must be one of {', '.join(SUFFIXES)}.")
    picture = draw(boxes(recipe, defaults=defaults), title).render()
    if path.suffix == ".svg":
        return write_file(path, standalone(picture))
    caption = "Each box is a config with the fields that it sets."
    return write_file(path, page(title, figure(picture, caption, natural_size=True), wide=True))


def boxes(recipe: Any, *, defaults: bool = False) -> Box:
    """The recipe's configs as boxes. A config in two places is a box at the first place and a name at the second.

    A model's sizes are shown even if they are defaults of its class.
    """
    first: dict[int, str] = {}

    def box(node: Any, name: str, path: str, part: int) -> Box:
        first[id(node)] = path or "the recipe"
        root = Box(name or "recipe", qualified_name(node.__fn_or_cls__).rpartition(".")[2], part)
        for number, (label, value, default) in enumerate(_fields(node, defaults)):
            below = f"{path}.{label}".removeprefix(".")
            if not isinstance(value, fdl.Buildable):
                root.rows.append(Row(label, shown_value(value), default=default))
            elif id(value) in first:
                root.rows.append(Row(label, f"same as {first[id(value)]}", default=default))
            else:
                child = box(value, label, below, number if part < 0 else part)
                root.rows.append(Row(label, child.title, child, default))
        return root

    return box(recipe, "", "", -1)


def draw(root: Box, title: str) -> Canvas:
    """The boxes from left to right, each next to the boxes of the configs inside it."""
    columns: list[float] = []

    def measure(box: Box, depth: int) -> None:
        columns.extend([0.0] * (depth + 1 - len(columns)))
        columns[depth] = max(columns[depth], _width(box))
        for child in (row.child for row in box.rows if row.child is not None):
            measure(child, depth + 1)

    measure(root, 0)
    starts = [_EDGE + sum(width + _BETWEEN for width in columns[:depth]) for depth in range(len(columns))]
    canvas = Canvas(starts[-1] + columns[-1] + _EDGE, 0, title=title)

    def place(box: Box, depth: int, top: float) -> tuple[float, float]:
        """Draw a box and all boxes inside it from ``top`` down. Returns the heights of its title and of the lower end."""
        end, joints = top, {}
        for row in box.rows:
            if row.child is not None:
                joints[id(row)], end = place(row.child, depth + 1, end)
                end += _GAP
        end = end - _GAP if joints else end
        height = _HEAD + (len(box.rows) * _LINE + 8 if box.rows else 0)
        y = max(top, min((top + end - height) / 2, next(iter(joints.values()), top) - _HEAD / 2)) if joints else top
        x, width = starts[depth], _width(box)
        canvas.rect(x, y, width, height, "card", radius=5, outline="edge")
        canvas.rect(x, y, width, _HEAD, f"c{box.part % 7}" if box.part >= 0 else "c7", radius=5)
        canvas.text(x + _PAD, y + 16, box.title, "ink", strong=True, tip=f"{box.name}: {box.title}")
        for number, row in enumerate(box.rows):
            middle = y + _HEAD + 4 + number * _LINE + 12
            tone = "soft" if row.default else "ink"
            canvas.text(x + _PAD, middle, row.label, "soft")
            if row.child is None:
                # Right-aligned, because the drawn width of the label isn't known exactly.
                canvas.text(x + width - _PAD, middle, _cut(row.value), tone, anchor="end", tip=row.value)
            else:
                # Straight to the column of elbows, vertically along it, and on to the title of the box.
                elbow = starts[depth + 1] - _BETWEEN / 2
                canvas.line(x + width, middle - 4, elbow, middle - 4, "soft")
                canvas.line(elbow, middle - 4, elbow, joints[id(row)], "soft")
                canvas.line(elbow, joints[id(row)], starts[depth + 1], joints[id(row)], "soft")
        return y + _HEAD / 2, max(end, y + height)

    _, canvas.height = place(root, 0, _EDGE)
    canvas.height += _EDGE
    return canvas


def _fields(node: Any, defaults: bool) -> Iterator[tuple[str, Any, bool]]:
    """The fields of a config as ``(label, value, whether it is unset)``. Lists and dicts with configs yield their items."""
    own = {step for step, _ in effective_children(node, defaults=False)}

    def spread(label: str, value: Any, default: bool) -> Iterator[tuple[str, Any, bool]]:
        if not isinstance(value, fdl.Buildable) and holds_configs(value):
            for step, child in effective_children(value, defaults=False):
                yield from spread(f"{label}{step}", child, default)
        else:
            yield label, value, default

    shown = effective_children(node, defaults=defaults)
    for step, value in shown if defaults else [*_sizes(node, own), *shown]:
        yield from spread(step.strip("."), value, step not in own)


def _sizes(node: Any, own: set[str]) -> list[tuple[str, Any]]:
    """The unset sizes of a model's config, whose values are its class's. Empty for other configs."""
    values = dict(effective_children(node, defaults=True))
    if not {".num_layers", ".hidden_size"} <= values.keys():
        return []
    names = [name for name in _SIZES if values.get(".num_moe_experts") or not name.startswith("moe_")]
    sizes = [(f".{name}", values.get(f".{name}")) for name in names if f".{name}" not in own]
    return [(step, value) for step, value in sizes if isinstance(value, int) and value]


def _width(box: Box) -> float:
    rows = [text_width(row.label) + (18 + text_width(_cut(row.value)) if row.child is None else 0) for row in box.rows]
    return max([text_width(box.title) * 1.25, *(width * 1.04 for width in rows)]) + 2 * _PAD


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
