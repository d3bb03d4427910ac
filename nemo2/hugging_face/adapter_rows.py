# SPDX-License-Identifier: Apache-2.0
"""Maps the rows of nemo2's layers to rows of released modules, for the export and import of adapters."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from nemo2.models.conversion.pieces import Piece, Shape
from nemo2.models.conversion.table import Entry, released_shapes
from nemo2.models.peft.canonical_lora import PARTS

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT = re.compile(r"\.weight(?P<section>\.\w+)?$")
_EXPERTS = ".experts.experts."
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")


class Rows(NamedTuple):
    """Some rows of a nemo2 weight, or of one section of it, and of the second factor and the magnitudes of its adapter."""

    entry: Entry
    section: str
    pieces: tuple[Piece, ...]
    """The rows of released weights that they are. Those of factors are never transposed."""

    @property
    def weights(self) -> list[str]:
        """The released weights to which these rows belong, each once."""
        return list(dict.fromkeys(piece.name for piece in self.pieces if piece.name is not None))

    @property
    def count(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    def parts(self, config: Any) -> dict[str, "Rows"]:
        """The rows of each part of a fused layer, in the part's order. Empty: the layer isn't fused."""
        names = PARTS.get(module_of(self.entry)[0].rpartition(".")[2], ())
        if names == PARTS["linear_qkv"]:
            # By query group: queries (with a gate those of each head, then its gates), key, value.
            gated = getattr(config, "attention_output_gate", False)
            groups, pieces = config.num_query_groups, self.pieces
            queries = (2 if gated else 1) * config.num_attention_heads // groups
            if len(pieces) == 1:  # the release has one tensor of the same rows
                head = self.count // (groups * (queries + 2))
                pieces, queries = _cut(pieces[0], [queries * head, head, head] * groups), 1
            kinds = itertools.cycle([names[0]] * (queries if gated else 1) + list(names[1:]))
            of_piece = list(zip(kinds, pieces, strict=False))
            return {name: self._replace(pieces=tuple(one for kind, one in of_piece if kind == name)) for name in names}
        if not names or not config.gated_linear_unit:
            return {}
        pieces = self.pieces
        if len(pieces) == 1:  # gate and up projection are one tensor
            pieces = _cut(pieces[0], [self.count // 2] * 2)
        return {name: self._replace(pieces=(piece,)) for name, piece in zip(names, pieces, strict=True)}


def _cut(piece: Piece, rows: Sequence[int]) -> tuple[Piece, ...]:
    """Consecutive parts of a piece, with these numbers of rows."""
    ends = [piece.start + end * piece.step for end in itertools.accumulate(rows)]
    starts = (piece.start, *ends)
    return tuple(replace(piece, start=start, stop=end) for start, end in zip(starts, ends, strict=False))


def rows_of(entry: Entry) -> Rows:
    """All rows of an entry's tensor."""
    return Rows(entry, module_of(entry)[1], tuple(replace(piece, transposed=False) for piece in entry.pieces))


def shared_rows(
    pieces: Iterable[Piece], ours: Tensor, released: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same rows of ``ours``, which consists of ``pieces``, and of the ``released`` tensors that are there."""
    row = 0
    for piece in pieces:
        if (whole := released.get(piece.name or "")) is not None:
            theirs = whole if piece.at is None else whole[piece.at]
            theirs = theirs.T if piece.transposed else theirs
            yield ours[row : row + piece.rows], theirs[piece.start : piece.stop : piece.step]
        row += piece.rows


def sizes_of(entries: Sequence[Entry]) -> dict[str, Shape]:
    """The outputs and inputs of each released linear layer, by the name of its weight."""
    transposed = {piece.name for entry in entries for piece in entry.pieces if piece.transposed}
    shapes = released_shapes(entries)
    return {name: shape[::-1] if name in transposed else shape for name, shape in shapes.items()}


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


def each_once(sections: Iterable[Rows]) -> list[str]:
    """The released weights to which the rows of these sections belong."""
    return list(dict.fromkeys(name for rows in sections for name in rows.weights))


def short_names(modules: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """The names for ``target_modules`` or ``modules_to_save``: the last part of a name, if ``modules`` has all layers of
    that name. ``all_names``: the last part of the name of each layer of the model."""
    modules = list(dict.fromkeys(modules))
    all_counts, counts = Counter(all_names), Counter(name.rpartition(".")[2] for name in modules)
    short = {last for last, count in counts.items() if all_counts[last] == count}
    return sorted(short) + sorted(name for name in modules if name.rpartition(".")[2] not in short)
