# SPDX-License-Identifier: Apache-2.0
"""Maps the rows of nemo2's layers to rows of released modules, for the export and import of adapters."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.models.conversion.table import Entry
from nemo2.models.peft.canonical_lora import PARTS

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT = re.compile(r"\.weight(?P<section>\.\w+)?$")
_EXPERTS = ".experts.experts."
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Rows:
    """Some rows of a nemo2 weight, or of one section of it."""

    entry: Entry
    section: str
    piece: Tensor
    """For each row, the index of its piece in the entry."""
    row: Tensor
    """For each row, its index in the piece's released tensor."""

    @property
    def modules(self) -> list[Optional[str]]:
        """The released module of each piece."""
        return [None if piece.name is None else module_name(piece.name) for piece in self.entry.pieces]

    @property
    def distinct_modules(self) -> list[str]:
        """The released modules to which these rows belong, each once."""
        modules = dict.fromkeys(self.modules[index] for index in self.piece.unique().tolist())
        return [name for name in modules if name is not None]

    def of(self, module: str) -> Tensor:
        """For each row, whether it belongs to this released module."""
        return torch.tensor([name == module for name in self.modules])[self.piece]

    def parts(self, config: Any) -> dict[str, "Rows"]:
        """The rows of each part of a fused layer, in the part's order. Empty: the layer isn't fused."""
        names = PARTS.get(module_of(self.entry)[0].rpartition(".")[2], ())
        if names == PARTS["linear_qkv"]:  # by query group: queries, key, value
            which = self.piece % len(names)
        elif names and config.gated_linear_unit:
            which = torch.arange(len(self.row)) // (len(self.row) // 2)
        else:
            return {}
        return {name: self._taken(which == index) for index, name in enumerate(names)}

    def _taken(self, chosen: Tensor) -> "Rows":
        return replace(self, piece=self.piece[chosen], row=self.row[chosen])


def rows_of(entry: Entry) -> Rows:
    """All rows of an entry's tensor."""
    rows = [torch.arange(piece.start, piece.stop, piece.step) for piece in entry.pieces]
    numbers = torch.repeat_interleave(torch.tensor([len(one) for one in rows]))
    return Rows(entry, module_of(entry)[1], numbers, torch.cat(rows))


def module_of(entry: Entry) -> tuple[str, str]:
    """The full name of the module whose weight this entry is, as in the keys of adapters, and the section of the
    weight. ``("", "")``: the entry isn't a weight."""
    key = entry.by_layer.key
    if (match := _WEIGHT.search(key)) is None:
        return "", ""
    module = key[: match.start()]
    if _EXPERTS in module:
        module = module.replace(_EXPERTS, f".experts.local_experts.{entry.at[-1]}.")
    return module, match["section"] or ""


def of_each_expert(module: str, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The modules whose adapters are stored under one key, each with its index on the axis of experts. A module outside
    the experts has a key of its own."""
    if _EXPERTS not in module:
        yield module, ()
        return
    for expert in range(count):
        yield module.replace(_EXPERTS, f".experts.local_experts.{expert}."), (expert,)


def stored_module(module: str) -> tuple[str, tuple[int, ...]]:
    """The inverse of `of_each_expert`: the module under which an adapter is stored, and its index."""
    match = _EXPERT.search(module)
    return (module, ()) if match is None else (module.replace(match[0], _EXPERTS), (int(match[1]),))


def module_name(tensor: str) -> str:
    """The module of a released tensor."""
    return tensor.removesuffix(".weight")


def each_once(sections: Iterable[Rows]) -> list[str]:
    """The released modules to which the rows of these sections belong."""
    return list(dict.fromkeys(name for rows in sections for name in rows.distinct_modules))


def short_names(modules: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """The names for ``target_modules`` or ``modules_to_save``: the last part of a name, if ``modules`` has all layers of
    that name. ``all_names``: the last part of the name of each layer of the model."""
    modules = list(dict.fromkeys(modules))
    all_counts, counts = Counter(all_names), Counter(name.rpartition(".")[2] for name in modules)
    short = {last for last, count in counts.items() if all_counts[last] == count}
    return sorted(short) + sorted(name for name in modules if name.rpartition(".")[2] not in short)
