# SPDX-License-Identifier: Apache-2.0
"""Converts an adapter in the format of Hugging Face's ``peft`` into a checkpoint. `nemo2.hugging_face.adapters` or
``peft`` wrote the adapter.

The family's table says which rows of which released modules make a layer of nemo2. The second factors (``lora_B``) are
combined in the same way. Released modules of a fused layer that all have the same first factor, as exports of `LoRA`
have, share it again. If they have a first factor each, their adapters become those of `CanonicalLoRA` or
`CanonicalDoRA`, which also have separate factors. In layers without parts they become one adapter
whose rank is the sum of the ranks, ``[B_q 0; 0 B_k] [A_q; A_k]``. Adapters of a lower rank than others are padded with
zeros, which training leaves at zero. Modules trained in full (``modules_to_save``) are stored like the model's own
weights.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

import fiddle as fdl
import torch
from torch import Tensor

from nemo2.base.advice import advice
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.base.names import listed
from nemo2.checkpoint.paths import HUGGING_FACE
from nemo2.hugging_face.adapter_files import Adapter, read_adapters, read_settings
from nemo2.hugging_face.adapter_rows import (
    ADAPTER_CONFIG,
    Rows,
    each_once,
    module_of,
    rows_of,
    shared_rows,
    short_names,
    sizes_of,
    stored_module,
)
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.importing import write_checkpoint
from nemo2.hugging_face.output_folders import check_target
from nemo2.hugging_face.streams import Computed, Stretch
from nemo2.hugging_face.tensor_source import TensorSource, cast
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.models.conversion.families import modules_with_weights
from nemo2.models.conversion.pieces import Piece
from nemo2.models.conversion.table import Conversion, Entry, released_shapes
from nemo2.models.peft import CanonicalDoRA, CanonicalLoRA, DoRA, LoRA
from nemo2.models.peft.canonical_lora import PARTS
from nemo2.models.walker import linear_layers, mtp_layer_name

_T = TypeVar("_T")
_SHOWN = 5


def import_adapter(
    source: Path | str,
    target: Path | str,
    *,
    base_model: Optional[Path | str] = None,
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
    show_progress: Optional[bool] = None,
) -> Path:
    """Convert the LoRA or DoRA in a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` into a
    checkpoint. Builds no model.

    The checkpoint holds the adapters and names the base model, like that of a fine-tuning run. It can be used for
    generation, merging and export, and training can start from it (``resume.restore_config``).

    Args:
        source: The folder.
        target: The checkpoint's directory, which appears only when it is complete.
        base_model: The adapter's base model: a nemo2 checkpoint (also ``nemo://name``), a folder of released weights,
            or ``hf://organisation/name``. None: the adapter's ``base_model_name_or_path``.
        dtype: The dtype of the adapters. None: the file's.
        overwrite, show_progress: As in `write_checkpoint`.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: files are missing, damaged or pickles; the adapter belongs to a model of another size; or no
            base model is found.
        ConfigError: a field of ``adapter_config.json`` requests a feature that nemo2's LoRA and DoRA lack.
        SecurityError: a file leads out of the folder.
    """
    check_target(target, overwrite=overwrite)
    folder = Path(source).expanduser()
    settings = read_settings(folder)
    checkpoint = Checkpoint.open(base_model or _named_base(settings, folder))
    checkpoint.refuse_adapters()
    model = fdl.build(checkpoint.model_config())
    base = checkpoint.tensors(model.config)
    adapters, whole = read_adapters(folder, settings)
    entries = list(base.conversion.entries(base.config, vocab_rows=base.config.vocab_size or 1))
    translated = _translated(adapters, base, entries, folder, dora=bool(settings.get("use_dora")))
    full, modules_to_save = _full_modules(base, entries, whole, folder)
    method = translated.kind(
        target_modules=_targets(translated.rows, base.config, apart=issubclass(translated.kind, CanonicalLoRA)),
        dim=translated.rank,
        alpha=translated.scale * translated.rank,
        dropout=settings.get("lora_dropout") or 0.0,
        modules_to_save=modules_to_save,
    )
    method.refuse_unknown_targets(linear_layers(base.config))
    model.model_transform = method
    return write_checkpoint(
        _AdapterTensors(folder, base.conversion, base.config, translated.tensors(method, base.config) | full),
        target,
        tokenizer=checkpoint.tokenizer(),
        dtype=dtype,
        overwrite=overwrite,
        show_progress=show_progress,
        model=model,
        part_of=checkpoint.source,
    )


def _named_base(settings: Mapping[str, Any], folder: Path) -> str:
    name = settings.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} does not name the model that it was trained on (base_model_name_or_path). Set "
            f"{advice('--base', 'base_model')} to a checkpoint, hf:///folder or hf://organisation/name."
        )
    revision = f"@{settings['revision']}" if settings.get("revision") else ""
    return name if Path(name).is_dir() or "://" in name else f"{HUGGING_FACE}{name}{revision}"


# ------------------------------------------------------------------------------------------------------- theirs to ours


class _Target(NamedTuple):
    """The place of a nemo2 adapter: a module, and a part of the module. "": the whole module."""

    module: str
    part: str


@dataclass
class _Translated:
    """nemo2's adapters, and the released adapters that they consist of."""

    kind: type[LoRA]
    rows: dict[_Target, list[Rows]]
    adapters: Mapping[str, Adapter]
    lengths: dict[tuple[_Target, str], Tensor] = field(default_factory=dict)

    def of(self, target: _Target) -> list[list[str]]:
        """The released adapters that one nemo2 adapter consists of, by first factor."""
        return _by_first_factor(self.rows[target], self.adapters)

    @property
    def scale(self) -> float:
        """The most frequent scale. The second factors of adapters with other scales are multiplied to compensate."""
        return Counter(adapter.scale for adapter in self.adapters.values()).most_common(1)[0][0]

    @property
    def rank(self) -> int:
        return max(sum(len(self.adapters[same[0]].first) for same in self.of(target)) for target in self.rows)

    def tensors(self, method: LoRA, config: Any) -> dict[Entry, Tensor]:
        """The adapters' tensors by their positions in a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for target, sections in self.rows.items():
            key = f"{target.module}.adapter.{target.part}{'.' if target.part else ''}"
            first = torch.cat([self.adapters[same[0]].first for same in self.of(target)])
            tensors[f"{key}linear_in.weight"] = torch.nn.functional.pad(first, (0, 0, 0, method.dim - len(first)))
            for rows in sections:
                tensors[f"{key}linear_out.weight{rows.section}"] = self._second(rows, self.of(target), method.dim)
                if (lengths := self.lengths.get((target, rows.section))) is not None:
                    tensors[f"{key}magnitude.weight{rows.section}"] = lengths
        by_entry = {}
        for name, tensor in tensors.items():
            key, at = stored_module(name)
            experts = (config.num_moe_experts,) if at else ()
            by_entry[Entry(key=key, shape=(*experts, *tensor.shape), at=at, pieces=())] = tensor
        return by_entry

    def _second(self, rows: Rows, names: list[list[str]], rank: int) -> Tensor:
        dtype = self.adapters[names[0][0]].second.dtype
        factor = torch.zeros(rows.count, rank, dtype=dtype)
        column = 0
        for same in names:
            seconds = {}
            for name in same:
                one = self.adapters[name]
                by = one.scale / self.scale
                seconds[name] = one.second if by == 1 else (one.second * by).to(dtype)
            columns = slice(column, column := column + len(self.adapters[same[0]].first))
            _fill(factor[:, columns], rows.pieces, seconds)
        return factor


def _by_first_factor(sections: Iterable[Rows], adapters: Mapping[str, Adapter]) -> list[list[str]]:
    """The names of the adapters of these rows. Those with equal first factors stand together."""
    groups: list[list[str]] = []
    for name in (name for name in each_once(sections) if name in adapters):
        first = adapters[name].first
        same = next((group for group in groups if torch.equal(adapters[group[0]].first, first)), None)
        groups.append([name]) if same is None else same.append(name)
    return groups


def _translated(
    adapters: Mapping[str, Adapter], base: TensorSource, entries: Sequence[Entry], folder: Path, *, dora: bool
) -> _Translated:
    weights = {f"{module}.weight": adapter for module, adapter in adapters.items()}
    named = _named_as_in_table(weights, base.conversion, sizes_of(entries))
    _refuse_other_sizes(named, entries, folder)
    # All sections of a layer, also those without an adapter (Qwen 3.5's first projection has released modules for some each).
    sections: dict[str, list[Rows]] = {}
    for entry in entries:
        sections.setdefault(module_of(entry)[0], []).append(rows_of(entry))
    modules = {module: rows for module, rows in sections.items() if module and named.keys() & each_once(rows)}
    linear = linear_layers(base.config) or {}
    if strange := [module for module in modules if _linear_name(module) not in linear]:
        raise ConfigError(
            f"{folder}: {', '.join(strange[:_SHOWN])} has an adapter, but nemo2's LoRA supports linear layers only: "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))}. Merge the adapter in peft, and "
            "import the model."
        )
    # Released modules with separate first factors, or some without an adapter, can be parts of one nemo2 layer.
    apart = any(
        module.rpartition(".")[2] in PARTS and [each_once(rows)] != _by_first_factor(rows, named)
        for module, rows in modules.items()
    )
    kind = (CanonicalDoRA if dora else CanonicalLoRA) if apart else DoRA if dora else LoRA
    experts = Counter(_linear_name(module) for module in modules if stored_module(module)[1])
    if some := [f"{name} ({count})" for name, count in experts.items() if count != base.config.num_moe_experts]:
        raise ConfigError(
            f"{folder}: {', '.join(some[:_SHOWN])}: only some of the {base.config.num_moe_experts} experts have an "
            "adapter, but in nemo2 all experts of a layer have one, or none. Merge the adapter in peft, and import "
            "the model."
        )
    translated = _Translated(kind, dict(_cut(modules, named, base.config, apart=apart)), named)
    if dora:
        translated.lengths = {
            (target, rows.section): _lengths(rows, named, base)
            for target, sections in translated.rows.items()
            for rows in sections
        }
    return translated


def _named_as_in_table(by_name: Mapping[str, _T], conversion: Conversion, names: Collection[str]) -> dict[str, _T]:
    """``by_name``, keyed by names in a file, with the names of the family's table as keys.

    Raises:
        CheckpointError: some names aren't in ``names``.
    """
    named = conversion.named_as_in_table(by_name)
    if strange := sorted(name.removesuffix(".weight") for name in named.keys() - set(names)):
        raise CheckpointError(
            f"The adapter changes {listed(strange, 5)}, which the "
            f"base, a {conversion.architectures[0]}, does not have. Use the base that it was trained on "
            f"({advice('--base', 'base_model=')})."
        )
    return named


def _refuse_other_sizes(adapters: Mapping[str, Adapter], entries: Sequence[Entry], folder: Path) -> None:
    sizes = sizes_of(entries)
    for name, adapter in adapters.items():
        outputs, inputs = sizes[name]
        lengths = adapter.lengths if adapter.lengths is not None else adapter.second[:, 0]
        if (adapter.second.shape[0], adapter.first.shape[1], len(lengths)) != (outputs, inputs, outputs):
            raise CheckpointError(
                f"{folder}: the adapter of {name.removesuffix('.weight')} has {adapter.first.shape[1]:,} inputs and "
                f"{adapter.second.shape[0]:,} outputs, but the base has {inputs:,} and {outputs:,}. The adapter was trained on "
                f"a model of another size. Use that model as the base ({advice('--base', 'base_model=')})."
            )


def _linear_name(module: str) -> str:
    """The name that `linear_layers` gives a layer. Experts share one name."""
    name = re.sub(r"\.local_experts\.\d+", "", module.removeprefix("module."))
    return name.replace(".transformer_layer.", f".{mtp_layer_name()}.")


def _cut(
    modules: Mapping[str, list[Rows]], adapters: Mapping[str, Adapter], config: Any, *, apart: bool
) -> Iterator[tuple[_Target, list[Rows]]]:
    for module, sections in modules.items():
        parts = sections[0].parts(config) if apart else {}
        for part, rows in parts.items():
            if any(name in adapters for name in rows.weights):
                yield _Target(module, part), [rows]
        if not parts:
            yield _Target(module, ""), sections


def _lengths(rows: Rows, adapters: Mapping[str, Adapter], base: TensorSource) -> Tensor:
    """DoRA's trained magnitudes. For rows without an adapter: the norms of the base model's rows."""
    trained = {name: adapters[name].lengths for name in rows.weights if name in adapters}
    lengths = {name: value for name, value in trained.items() if value is not None}
    dtype = next(adapter.lengths.dtype for adapter in adapters.values() if adapter.lengths is not None)
    whole = len(trained) == len(rows.weights)
    magnitudes = (
        torch.empty(rows.count, dtype=dtype) if whole else base.values(rows.entry).float().norm(dim=1).to(dtype)
    )
    return _fill(magnitudes, rows.pieces, lengths)


def _targets(rows: Iterable[_Target], config: Any, *, apart: bool) -> list[str]:
    """The names for ``target_modules``, short if all layers of that name are included."""
    layers = [(_linear_name(target.module), target.part) for target in rows]
    if apart:  # a layer that isn't fused (`linear_fc1` without a gate) goes by its last part
        layers = [(name, part or PARTS.get(name.rpartition(".")[2], ("",))[-1]) for name, part in layers]
    lasts = (name.rpartition(".")[2] for name in linear_layers(config) or {})
    names = (part for last in lasts for part in (PARTS.get(last, (last,)) if apart else (last,)))
    return short_names((f"{name.rpartition('.')[0]}.{part}" if part else name for name, part in layers), names)


def _fill(ours: Tensor, pieces: Iterable[Piece], released: Mapping[str, Tensor]) -> Tensor:
    """``ours``, with the rows of the released tensors that are there."""
    for mine, theirs in shared_rows(pieces, ours, released):
        mine.copy_(theirs)
    return ours


# ------------------------------------------------------------------------------------------- modules trained in full


def _full_modules(
    base: TensorSource, entries: Sequence[Entry], whole: Mapping[str, Tensor], folder: Path
) -> tuple[dict[Entry, Tensor], list[str]]:
    """The nemo2 tensors that such tensors make, by their positions in a checkpoint, and the names of their modules in the
    form of our methods' ``modules_to_save``. If several released tensors make one tensor, rows of missing ones come from
    the base model.

    Args:
        entries: The base model's entries.
        whole: Released tensors by their names in the file.
        folder: The folder, for errors.

    Raises:
        CheckpointError: the base model lacks these tensors, or has them in another size.
        ConfigError: embedding and output layer are one tensor in the base model, but two in the file.
    """
    tied = base.config.share_embeddings_and_output_weights
    _, output = base.conversion.vocabulary_names(base.config)
    outputs = [tensor for name, tensor in whole.items() if tied and name.endswith(output)]
    whole = {name: tensor for name, tensor in whole.items() if not (tied and name.endswith(output))}
    names = {piece.name for entry in entries for piece in entry.pieces if piece.name is not None}
    released = _named_as_in_table(whole, base.conversion, names) if whole else {}
    shapes = released_shapes(entries)
    for name, tensor in released.items():
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: {name} is {list(tensor.shape)} in the adapter, but {list(shapes[name])} in the "
                "base. The adapter was trained on a model of another size, or with a resized vocabulary. Use "
                f"that model as the base ({advice('--base', 'base_model=')})."
            )
    trained = {
        entry: _full_tensor(entry, released, base)
        for entry in entries
        if any(piece.name in released for piece in entry.pieces)
    }
    if tied:
        _refuse_untied([trained[entry] for entry in trained if entry.vocabulary], outputs, folder)
    tensors, modules = {}, []
    for entry, tensor in trained.items():
        tensors[replace(entry.by_layer, pieces=())] = tensor
        modules.append(module_of_key(entry.by_layer.key.removeprefix("module.")))
    return tensors, short_names(modules, (name.rpartition(".")[2] for name in modules_with_weights(base.config) or ()))


def _full_tensor(entry: Entry, released: Mapping[str, Tensor], base: TensorSource) -> Tensor:
    parts = [released.get(piece.name or "") for piece in entry.pieces]
    dtype = next(part.dtype for part in parts if part is not None)
    complete = all(piece.name is None or piece.name in released for piece in entry.pieces)
    tensor = torch.zeros(entry.own_shape, dtype=dtype) if complete else base.values(entry).to(dtype)
    return _fill(tensor, entry.pieces, released)


def _refuse_untied(embedding: list[Tensor], output: list[Tensor], folder: Path) -> None:
    """Refuse an embedding and an output layer, which are one tensor in the base model, unless the file has both and they are
    equal. peft stores both where it trains them as one, and with ``ensure_weight_tying`` it does so only for an embedding
    that is called embed_tokens."""
    if not embedding and not output:
        return
    if embedding and output and torch.equal(embedding[0][: len(output[0])], output[0]):
        return
    which = (
        "both apart from each other" if embedding and output else "the embedding" if embedding else "the output layer"
    )
    raise ConfigError(
        f"{folder}: modules_to_save has {which}, but in the base, as in Megatron-Core, the embedding and the "
        "output layer are one tensor (tie_word_embeddings). The adapter has split it into two. Train the adapter "
        "with ensure_weight_tying=True. Or merge it in peft, untie the model (tie_word_embeddings=False), and "
        "import that model."
    )


# ------------------------------------------------------------------------------------------------------- what is written


@dataclass(frozen=True)
class _AdapterTensors:
    """The adapters' tensors as a `nemo2.hugging_face.tensor_source.TensorSource`."""

    folder: Path
    conversion: Conversion
    config: Any
    tensors: Mapping[Entry, Tensor]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.tensors)

    def dtype_of(self, entry: Entry) -> torch.dtype:
        return self.values(entry).dtype

    def values(self, entry: Entry) -> Tensor:
        return self.tensors[entry]

    def stretches(self, entry: Entry, dtype: torch.dtype) -> list[Stretch]:
        tensor = self.values(entry)
        return [Computed(tensor.numel() * dtype.itemsize, lambda: iter([cast(tensor, dtype, of=entry.key)]))]
