# SPDX-License-Identifier: Apache-2.0
"""A family's conversion between Hugging Face's files and nemo2's checkpoints, as a table with a `Row` for each tensor
of a layer.

A row names a key of a *checkpoint* (`nemo2.mcore.parallel.sharded_state`, without "module."; not a parameter's name, which
differs between layer implementations) and an operation of `nemo2.models.conversion.pieces` on names of the file:

    def rows(config: LlamaConfig) -> list[Row]:
        return [
            Row("embedding.word_embeddings.weight", one("model.embed_tokens.weight")),
            *under("decoder.layers.*.", "model.layers.*.", [
                *norm("self_attention.linear_qkv.layer_norm_", one("input_layernorm.")),
                *linear("self_attention.linear_qkv.", qkv("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
                        bias=config.add_qkv_bias),
            ]),
        ]

``*`` in a key is the layer. Keys of experts (``.experts.experts.``) stand for all experts. Differences between the
sizes of a family are plain Python on its config. A row for some layers only names them (``layers=``). Shapes come from
the config (`tensor_shapes`), so a row has no numbers. Whether layers are stacked under one key or stored separately follows
from the config, as in Megatron-Core. Padding of the vocabulary is added and removed automatically.

A `Conversion` consists of the table, the family's names in ``config.json``, and the conversion of its settings in both
directions. ``families.py`` finds all.
"""

import copy
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional, TypeVar

import torch

from nemo2.mcore.parallel.sharded_state import key_by_layer
from nemo2.models.conversion.pieces import Operation, Piece, Place, Shape
from nemo2.models.parts import Attention, DeltaNet, Mixer, Part
from nemo2.models.walker import mtp_layer_name, shape_of

_NORMS = ["final_layernorm", "final_norm", "input_layernorm", "pre_mlp_layernorm", "post_layernorm", "enorm", "hnorm"]
"""The norms that are as wide as the model."""


class TensorShapes:
    """The shapes of one model's tensors.

    Args:
        config: nemo2's configuration.
        vocab_rows: The rows of the embedding, including padding.
    """

    def __init__(self, config: Any, *, vocab_rows: int) -> None:
        self.config, self.vocab_rows = config, vocab_rows
        model = shape_of(config, vocab_rows)
        self._linears = {_stored(name): linear for name, linear in model.linears()}
        layers = (*model.layers, *model.further)
        self._parts = {_stored(f"{layer.name}.{part.name}"): part for layer in layers for part in layer.parts}

    def part_of(self, key: str) -> Part | None:
        """The part of a layer that a tensor belongs to. None: another tensor."""
        return self._parts.get(_in_part(key)[0])

    def of(self, key: str) -> Shape:
        """The shape of the tensor stored under ``key``, without "module." and for one expert.

        Raises:
            KeyError: the key is unknown, which is a mistake in a table.
        """
        module, _, name = key.replace(".experts.experts.", ".experts.").rpartition(".")
        if (linear := self._linears.get(module)) is not None:
            rows, columns = (linear.outputs,), (linear.inputs,)
            own = {"weight": rows + columns, "bias": rows, "expert_bias": rows}
            return {**own, "layer_norm_weight": columns, "layer_norm_bias": columns}[name]
        of_model = self._of_model()
        end = ".".join(key.split(".")[-2:])
        return of_model[end] if end in of_model else self._of_part(self.part_of(key))[_in_part(key)[1]]

    def _of_model(self) -> dict[str, Shape]:
        hidden = self.config.hidden_size
        return {
            "word_embeddings.weight": (self.vocab_rows, hidden),
            "output_layer.weight": (self.vocab_rows, hidden),
            "position_embeddings.weight": (getattr(self.config, "seq_length", 0), hidden),
            "shared_experts.gate_weight": (1, hidden),
            **{f"{norm}.{name}": (hidden,) for norm in _NORMS for name in ("weight", "bias")},
        }

    def _of_part(self, part: Part | None) -> dict[str, Shape]:
        """The weights of a part outside its matrices, and the sections of a mixer's tensors."""
        if isinstance(part, Attention):
            over_heads = getattr(self.config, "qk_layernorm_over_heads", False)
            return {
                "q_layernorm.weight": (part.query_width if over_heads else part.head_dim,),
                "k_layernorm.weight": (part.kv_width // 2 if over_heads else part.head_dim,),
                "core_attention.softmax_offset": (part.heads,),
            }
        if not isinstance(part, Mixer | DeltaNet):
            return {}
        if isinstance(part, Mixer):
            norm, heads, taps = {"norm.weight": (part.inner,)}, part.heads, 4
        else:
            norm, heads, taps = (
                {"out_norm.weight": (part.value_dim,)},
                part.value_heads,
                self.config.linear_conv_kernel_dim,
            )
        return {
            **norm,
            **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
            **{f"in_proj.weight.{name}": (rows, part.hidden) for name, rows in part.sections.items()},
            **{f"conv1d.weight.{name}": (rows, 1, taps) for name, rows in part.sections.items()},
            **{f"conv1d.bias.{name}": (rows,) for name, rows in part.sections.items()},
        }


def _stored(module: str) -> str:
    """The name in checkpoints of a module under `nemo2.models.walker`'s name."""
    return module.replace(f".{mtp_layer_name()}.", ".transformer_layer.")


def _in_part(key: str) -> tuple[str, str]:
    """The full name of the part that a layer's tensor belongs to, and the tensor's name there."""
    steps = key.split(".")
    depth = 5 if steps[0] == "mtp" else 4
    return ".".join(steps[:depth]), ".".join(steps[depth:])


T = TypeVar("T")
_EXPERTS = ".experts.experts."
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Row:
    """A tensor's key in a checkpoint, and the operation that makes the tensor from those of the file."""

    key: str
    operation: Operation
    layers: Optional[Sequence[int]] = None
    """The layers that have the tensor, from 0. None: all layers. Unused for keys without ``*``."""
    shift: int = 0
    """The number to add to the layer's number in the file's names, if the file counts differently."""
    dtype: Optional[torch.dtype] = None
    """The dtype that this tensor keeps, whatever dtype the model is converted to. None: the model's dtype."""


IN_VISION_MODEL: dict[str, Any] = {
    "ignored": ("*vision_tower.*", "*vision_model.*", "*multi_modal_projector.*"),
    "renamed": (("model.language_model.", "model."), ("language_model.", "")),
}
"""The fields of a `Conversion` whose model may be the text part of a file with a vision model."""


def linear(key: str, operation: Operation, *, bias: bool = False, **more: Any) -> list[Row]:
    """The rows of a linear layer's weight and, with ``bias``, of its bias. The key and the names end with the dot."""
    return [_ending(key, operation, end, **more) for end in ("weight", "bias")[: 1 + bias]]


norm = linear  # the rows of a norm, whose key ends with the characters before "weight": a dot or ``layer_norm_``


def under(key: str, name: str, rows: Iterable[Row], **more: Any) -> list[Row]:
    """``rows`` with ``key`` in front of their keys, and ``name`` in front of their names."""
    return [
        replace(row, key=key + row.key, operation=row.operation.renamed(lambda one: name + one), **more) for row in rows
    ]


def _ending(key: str, operation: Operation, end: str, **more: Any) -> Row:
    return Row(key + end, operation.renamed(lambda name: name + end), **more)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A part of a stored tensor that is converted at once: the whole tensor, or one layer's and expert's part of a stacked
    tensor."""

    key: str
    """The key of the stored tensor, with "module."."""
    shape: Shape
    """The shape of the whole stored tensor, stacked axes first."""
    at: Shape
    """The indices in the stacked axes: (layer, expert), one of them, or ()."""
    pieces: tuple[Piece, ...]
    dtype: Optional[torch.dtype] = None
    vocabulary: bool = False
    """Whether the rows are those of a vocabulary, whose last rows may be padding."""

    @property
    def own_shape(self) -> Shape:
        """The shape without the stacked axes."""
        return self.shape[len(self.at) :]

    @property
    def by_layer(self) -> "Entry":
        """This part in a checkpoint that stores each layer under a key of its own, as one with only some layers does."""
        key = key_by_layer(self.key, self.at, bool(self.at))
        return self if key == self.key else replace(self, key=key, shape=self.shape[1:], at=self.at[1:])


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The conversion of a family of models."""

    architectures: tuple[str, ...]
    """The family's names under "architectures" in config.json. Exports write the first."""
    model: Any
    """nemo2's LightningModule."""
    configs: tuple[type, ...]
    """nemo2's configuration classes. Their subclasses belong to the family too."""
    rows: Callable[[Any], list[Row]]
    """The table of a configuration."""
    config: Callable[[Mapping[str, Any]], Any]
    """nemo2's configuration for a config.json. Raises ConfigError with field and value for a model that nemo2 doesn't
    support."""
    hf_config: Callable[[Any], dict[str, Any]]
    """The fields of config.json for nemo2's configuration, without "architectures" and dtype."""
    ignored: tuple[str, ...] = ()
    """Patterns of names in files that aren't read, such as buffers and vision towers. ``*`` matches any characters."""
    biased: tuple[str, ...] = ()
    """Fields of nemo2's configuration that are always on in Hugging Face's class. If they are off, an export writes zeros for
    the biases that they would add."""
    unbiased: Callable[[Mapping[str, Any]], Sequence[str]] = lambda hf: ()
    """Patterns of names of biases that nemo2's model has and a file with this config.json lacks. An import sets these biases
    to zero."""
    text_types: tuple[str, ...] = ()
    """The types of the text model in config.json, if other families have the same architecture. Empty: any other type."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Prefixes of names in some files, each with the prefix in the table. Exports don't use them."""

    def entries(self, config: Any, *, vocab_rows: int, released_rows: Optional[int] = None) -> Iterator[Entry]:
        """All parts of all tensors, in the order of the layers.

        Args:
            config: nemo2's configuration.
            vocab_rows: The rows of nemo2's embedding, including padding.
            released_rows: The rows of the file's embedding. None: ``vocab_rows``.
        """
        yield from _Table(self, config, vocab_rows, vocab_rows if released_rows is None else released_rows)

    def as_biased(self, config: Any) -> Any:
        """``config``, with the fields of ``biased`` on. If they are off, a copy."""
        if all(getattr(config, name) for name in self.biased):
            return config
        biased = copy.copy(config)
        for name in self.biased:
            setattr(biased, name, True)
        return biased

    def named_as_in_table(self, by_name: Mapping[str, T]) -> dict[str, T]:
        """``by_name``, keyed by the names of a file, with the table's names as keys."""
        return {self._name(name): value for name, value in by_name.items()}

    def _name(self, name: str) -> str:
        for theirs, ours in self.renamed:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def vocabulary_names(self, config: Any) -> tuple[str, ...]:
        """The names of the embedding and, in files where it isn't tied to the embedding, of the output layer."""
        untied = copy.copy(config)
        untied.share_embeddings_and_output_weights = False
        names = {row.key: row.operation.names[0] for row in self.rows(untied)}
        return tuple(names[key] for key in _VOCABULARY)

    def is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


@dataclass(frozen=True)
class _Table:
    conversion: Conversion
    config: Any
    vocab_rows: int
    released_rows: int

    def __iter__(self) -> Iterator[Entry]:
        rows = self.conversion.rows(self.config)
        yield from (entry for row in rows if _is_before_layers(row) for entry in self._of(row, None))
        numbered = [row for row in rows if "*" in row.key]
        for layer in range(max((len(self._layers(row)) and max(self._layers(row)) + 1 for row in numbered), default=0)):
            for row in numbered:
                if layer in self._layers(row):
                    yield from self._of(row, layer)
        yield from (
            entry for row in rows if "*" not in row.key and not _is_before_layers(row) for entry in self._of(row, None)
        )

    def _layers(self, row: Row) -> Sequence[int]:
        return range(self.config.num_layers) if row.layers is None else row.layers

    def _of(self, row: Row, layer: Optional[int]) -> Iterator[Entry]:
        name = row.key if layer is None else row.key.replace("*", str(layer), 1)
        own, part = self._shapes.of(name), self._shapes.part_of(name)
        vocabulary = row.key in _VOCABULARY
        released = self.released_rows if vocabulary else own[0]
        padding = (Piece(name=None, start=0, stop=own[0] - released),) if own[0] > released else ()
        key, stacked, at = self._key(row, layer)
        experts = range(self.config.num_moe_experts) if _EXPERTS in row.key else [None]
        heads = {}
        if isinstance(part, Attention):
            heads = {"heads": part.heads, "groups": part.groups, "head_dim": part.head_dim}
        for expert in experts:
            place = Place(
                rows=min(own[0], released),
                layer=None if layer is None else layer + row.shift,
                expert=expert,
                **heads,
            )
            yield Entry(
                key=key,
                shape=(*stacked, *([] if expert is None else [len(experts)]), *own),
                at=(*at, *([] if expert is None else [expert])),
                pieces=(*row.operation.pieces(place), *padding),
                dtype=row.dtype,
                vocabulary=vocabulary,
            )

    def _key(self, row: Row, layer: Optional[int]) -> tuple[str, Shape, Shape]:
        """The key, and the size of the axis along which layers are stacked, and the layer's index in it."""
        if layer is None:
            return f"module.{row.key}", (), ()
        if self._stacked and row.key.startswith("decoder."):
            return f"module.{row.key.replace('.*', '', 1)}", (self.config.num_layers,), (layer,)
        return f"module.{row.key.replace('*', str(layer), 1)}", (), ()

    @cached_property
    def _stacked(self) -> bool:
        return stacks_layers(self.config)

    @cached_property
    def _shapes(self) -> TensorShapes:
        return TensorShapes(self.config, vocab_rows=self.vocab_rows)


def _is_before_layers(row: Row) -> bool:
    return row.key.startswith("embedding.")


def stacks_layers(config: Any) -> bool:
    """Whether Megatron-Core stores the layers of this model stacked under one key. False: each key has its layer's number.

    Source: ``TransformerBlock.sharded_state_dict`` and ``MambaStack.sharded_state_dict`` of Megatron-Core.
    """
    if getattr(config, "hybrid_override_pattern", None) or config.heterogeneous_block_specs:
        return False
    for name in ("moe_layer_freq", "linear_attention_freq"):
        frequency = getattr(config, name, None)
        if isinstance(frequency, list) or (isinstance(frequency, int) and frequency > 1):
            return False
    return not config.hetereogenous_dist_checkpoint


def released_shapes(entries: Iterable[Entry]) -> dict[str, Shape]:
    """The shapes of the file's tensors that these entries are made of, by name."""
    shapes_by_name: dict[str, Shape] = {}
    for entry in entries:
        for piece in entry.pieces:
            if piece.name is None:
                continue
            rows, inner = range(piece.start, piece.stop, piece.step)[-1] + 1, entry.own_shape[1:]
            shape = (inner[0], rows) if piece.transposed else (rows, *inner)
            shape = shape if piece.at is None else (piece.at + 1, *shape)
            before = shapes_by_name.get(piece.name, shape)
            shapes_by_name[piece.name] = tuple(max(one, other) for one, other in zip(shape, before, strict=True))
    return shapes_by_name
