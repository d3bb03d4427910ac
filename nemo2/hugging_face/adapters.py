# SPDX-License-Identifier: Apache-2.0
"""Exports the adapters of a fine-tuning run as a folder that Hugging Face's ``peft`` loads on top of the released
model.

The family's table for exporting weights also exports adapters. A module's weight consists of pieces, which are rows of
released tensors. The second factor of its adapter has the same rows, and the first factor goes to each released module
with these rows. The separate parts of a fused layer (`CanonicalLoRA`) each have a first factor. If a released module
takes several of them (Phi-3's ``qkv_proj``), its rank is their sum: ``[B_q 0; 0 B_k] [A_q; A_k]``. Modules trained in
full are written as in the release, and are named in ``modules_to_save``.
"""

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.base.advice import export_merged
from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.context import load_context
from nemo2.checkpoint.directory import take_place, weights_dir
from nemo2.checkpoint.paths import HUGGING_FACE
from nemo2.hugging_face.adapter_rows import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Rows,
    module_of,
    of_each_expert,
    rows_of,
    shared_rows,
    sizes_of,
)
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.output_folders import check_target, new_folder
from nemo2.hugging_face.safetensors_files import write_json
from nemo2.hugging_face.stored import StoredTensors
from nemo2.hugging_face.tensor_source import cast, weights_dtype
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.models.conversion.families import conversion_of
from nemo2.models.conversion.table import Entry, released_shapes
from nemo2.models.peft import DoRA, LoRA

_log = logging.getLogger(__name__)
_ADAPTER = re.compile(r"(?P<module>.+)\.adapter\.(?P<rest>.+)\.weight(?P<section>\.\w+)?$")
"""The adapter of a Mamba mixer's projection stores its rows section by section, like the weight."""
_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.\d+\.(?P<leaf>\w+)\.weight")
_GATE_UP = ("gate_up_proj", ("gate_proj", "up_proj"))
_STACKED = {"gate_proj": _GATE_UP, "up_proj": _GATE_UP, "down_proj": ("down_proj", ("down_proj",))}
"""The parameters of transformers 5 that hold all experts of a layer, with what they hold, by the released names."""
_STACKED_BY_PEFT = dict.fromkeys(("w1", "w3"), ("gate_up_proj", ("w1", "w3")))
"""Those that peft itself makes of the names of Mixtral's modules."""


def export_adapter(
    checkpoint: Path | str,
    target: Path | str,
    *,
    base_model: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a checkpoint as ``adapter_config.json`` and ``adapter_model.safetensors``. Builds no model.

    Args:
        checkpoint: A checkpoint of a fine-tuning run with `LoRA` or a method derived from it, of any layout and
            strategy.
        target: The folder, which appears only when it is complete.
        base_model: The base model in ``peft``'s configuration. None: the released weights that the run started from, or
            nothing if it started from a nemo2 checkpoint.
        dtype: The dtype of the adapters. None: the stored dtype.
        overwrite: Replace ``target``.

    Returns:
        The folder.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no adapters; or ``target`` exists.
        ConfigError: Hugging Face has no such model, or ``peft`` no such adapters.
    """
    final, wanted = check_target(target, overwrite=overwrite), weights_dtype(dtype)
    source = Checkpoint.open(checkpoint).require_nemo2().require_complete()
    model = load_context(source.path, "model")
    method = getattr(model, "model_transform", None)
    if not isinstance(method, LoRA):
        raise CheckpointError(
            f"{source.path} has no adapters that peft supports: its model_transform is "
            f"{'none' if method is None else type(method).__name__}. Supported are LoRA, DoRA, CanonicalLoRA and "
            f"CanonicalDoRA.{'' if method is None else f' For others, {export_merged()}.'}"
        )
    stored = StoredTensors(weights_dir(source.path))
    conversion = conversion_of(model.config)
    entries = list(conversion.entries(model.config, vocab_rows=model.config.vocab_size or 1))
    whole = _whole(source, stored, method, model.config, entries)
    embedding, output = conversion.vocabulary_names(model.config)
    tied = model.config.share_embeddings_and_output_weights and embedding in whole
    if tied:  # peft reads both names, and without ensure_weight_tying trains two tensors
        whole[output] = whole[embedding].clone()
    adapters = _collected(stored, besides={one.key for entry in entries for one in (entry, entry.by_layer)})
    modules, saved = _released(adapters, model.config, entries), _outermost(whole)
    if both := sorted(name for name in modules if _is_inside(name, saved)):
        raise ConfigError(
            f"{both[0]} has an adapter, and peft.modules_to_save trains the module around it in full, which peft doesn't "
            f"support. Name the layers in peft.modules_to_save, or {export_merged()}."
        )
    tensors = {f"base_model.model.{name}": tensor for name, tensor in whole.items()} | dict(_tensors(modules))
    if diverged := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise CheckpointError(
            f"{source.path}: {diverged[0]} has values that are infinite or no numbers, so its training has diverged. Export an "
            "earlier checkpoint."
        )
    tensors = {name: (tensor if wanted is None else cast(tensor, wanted, of=name)) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with new_folder(final, num_bytes, overwrite=overwrite, reads=[source.path, source.base]) as temporary:
        base = source.base if (source.base or "").startswith(HUGGING_FACE) else None
        described = _adapter_config(modules, entries, method, base_model or (base or "").removeprefix(HUGGING_FACE))
        described["modules_to_save"] = sorted(saved) or None
        described |= {"ensure_weight_tying": True} if tied else {}
        _write_files(temporary, tensors, described)
        take_place(temporary, final)
    return final


# ------------------------------------------------------------------------------------------------------- ours to theirs


_AdapterPart = dict[str, Tensor]
"""The tensors of one part of a module: "linear_in" and "linear_out", and for DoRA "magnitude", the rows' lengths."""


@dataclass
class _Released:
    """The factors of a released module: a first factor for each nemo2 adapter of its rows, and the rows of the second
    factors."""

    num_rows: int
    """The number of rows of its weight: its outputs."""
    firsts: list[Tensor] = field(default_factory=list)
    seconds: list[Tensor] = field(default_factory=list)
    lengths: Optional[Tensor] = None

    def rows_of(self, first: Tensor) -> Tensor:
        """The second factor for this first factor, to be filled by the caller."""
        for one, second in zip(self.firsts, self.seconds, strict=True):
            if one is first:
                return second
        self.firsts.append(first)
        self.seconds.append(torch.zeros(self.num_rows, first.shape[0], dtype=first.dtype))
        return self.seconds[-1]

    def lengths_like(self, lengths: Tensor) -> Tensor:
        """The rows' magnitudes, to be filled by the caller."""
        if self.lengths is None:
            self.lengths = torch.full((self.num_rows,), math.nan, dtype=lengths.dtype)
        return self.lengths

    @property
    def rank(self) -> int:
        return sum(first.shape[0] for first in self.firsts)


def _whole(
    source: Checkpoint, stored: StoredTensors, method: LoRA, config: Any, entries: Sequence[Entry]
) -> dict[str, Tensor]:
    """The modules trained in full, as released tensors. peft loads all tensors of a module or none, so those that weren't
    trained, such as the biases of a router's choice, come from the base model.

    Raises:
        CheckpointError: the base model is needed, and is missing.
    """
    trained = [entry for entry in entries if stored.find(entry) is not None]
    if source.base is None:  # the whole model was saved
        trained = [
            entry for entry in trained if method.trains_whole(module_of_key(entry.by_layer.key.removeprefix("module.")))
        ]
    modules = _outermost(piece.name for entry in trained for piece in entry.pieces if piece.name is not None)
    kept = [entry for entry in entries if any(_is_inside(piece.name or "", modules) for piece in entry.pieces)]
    lacked = {entry for entry in kept if stored.find(entry) is None}
    base = Checkpoint.open(source.base).tensors(config) if lacked and source.base is not None else stored
    tensors: dict[str, Tensor] = {}
    shapes = released_shapes(entries)
    for entry in kept:
        values = (base if entry in lacked else stored).values(entry)
        for piece in entry.pieces:
            if piece.name is not None and _is_inside(piece.name, modules) and piece.name not in tensors:
                tensors[piece.name] = torch.empty(shapes[piece.name], dtype=values.dtype)
        for mine, theirs in shared_rows(entry.pieces, values, tensors):
            theirs.copy_(mine)
    return tensors


def _outermost(names: Iterable[str]) -> set[str]:
    """The modules of these tensors, without those that stand inside another of them."""
    modules = {name.rpartition(".")[0] for name in names}
    return {module for module in modules if not _is_inside(module, modules)}


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a module or a tensor stands in one of ``modules``, at any depth."""
    return any(name[:end] in modules for end, sign in enumerate(name) if sign == ".")


def _collected(stored: StoredTensors, *, besides: Collection[str]) -> dict[str, dict[str, _AdapterPart]]:
    """The adapters by module and part ("": the whole layer). ``besides``: keys that belong to the model itself."""
    adapters: dict[str, dict[str, _AdapterPart]] = {}
    for key, about in stored.tensors.items():
        if key in besides:
            continue
        if (match := _ADAPTER.match(key)) is None:
            raise ConfigError(f"{stored.weights}: {key} is not a LoRA tensor, and peft has no equivalent.")
        part, _, name = match["rest"].rpartition(".")
        for module, at in of_each_expert(match["module"], about.size[0]):
            entry = Entry(key=key, shape=tuple(about.size), at=at, pieces=())
            part_tensors = adapters.setdefault(module, {}).setdefault(part, {})
            part_tensors[name + (match["section"] or "")] = stored.values(entry)
    return adapters


def _released(
    adapters: Mapping[str, Mapping[str, _AdapterPart]], config: Any, entries: Sequence[Entry]
) -> dict[str, _Released]:
    modules: dict[str, _Released] = {}
    sizes = sizes_of(entries)
    met = set()
    for entry in entries:
        module, _ = module_of(entry)
        if module in adapters:
            met.add(module)
            _distribute(rows_of(entry), adapters[module], modules, sizes, config)
    if left := adapters.keys() - met:
        names = ", ".join(sorted(left)[:5])
        raise ConfigError(
            f"{type(config).__name__}: adapters of {names} do not belong to any tensor of its Hugging Face model."
        )
    return {name.removesuffix(".weight"): module for name, module in modules.items()}


def _distribute(
    rows: Rows,
    parts_of_module: Mapping[str, _AdapterPart],
    modules: dict[str, _Released],
    sizes: Mapping[str, tuple[int, ...]],
    config: Any,
) -> None:
    if stacked := [piece.name for piece in rows.pieces if piece.at is not None]:
        raise ConfigError(
            f"{stacked[0]} contains all experts of a layer in one tensor, and peft does not support adapters of a "
            f"part of a tensor. Remove the experts from peft.target_modules, or {export_merged()}."
        )
    parts = {"": rows} if "" in parts_of_module else rows.parts(config)
    for part in (name for name in parts if name in parts_of_module):
        tensors, own = parts_of_module[part], parts[part]
        released = {name: modules.setdefault(name, _Released(sizes[name][0])) for name in own.weights}
        first, second = tensors["linear_in"], tensors[f"linear_out{rows.section}"]
        filled = [(second, {name: one.rows_of(first) for name, one in released.items()})]
        if (lengths := tensors.get(f"magnitude{rows.section}")) is not None:
            filled.append((lengths, {name: value.lengths_like(lengths) for name, value in released.items()}))
        for ours, of_released in filled:
            for mine, theirs in shared_rows(own.pieces, ours, of_released):
                theirs.copy_(mine)


# ------------------------------------------------------------------------------------------------------- what is written


def _tensors(modules: Mapping[str, _Released]) -> Iterator[tuple[str, Tensor]]:
    for name, module in modules.items():
        prefix = f"base_model.model.{name}"
        yield f"{prefix}.lora_A.weight", torch.cat(module.firsts)
        yield f"{prefix}.lora_B.weight", torch.cat(module.seconds, dim=1)
        if module.lengths is not None:
            if bool(module.lengths.isnan().any()):
                raise ConfigError(
                    f"{name} is one tensor in the release, but only some of its rows have trained magnitudes. peft "
                    f"supports magnitudes for all rows or none. Instead, {export_merged()}."
                )
            yield f"{prefix}.lora_magnitude_vector", module.lengths


def _adapter_config(
    modules: Mapping[str, _Released], entries: Sequence[Entry], method: LoRA, base_model: str
) -> dict[str, Any]:
    """``adapter_config.json`` as peft 0.21 reads it."""
    scale = method.alpha / method.dim
    targets = _targets(modules, entries)
    ranks = {name: rank for name, (_, rank) in targets.items() if rank != method.dim}
    parameters = sorted(name for name, (is_parameter, _) in targets.items() if is_parameter)
    if parameters and isinstance(method, DoRA):
        raise ConfigError(
            f"peft has no DoRA for {parameters[0]}: beside experts it trains this layer as a parameter. Instead, "
            f"{export_merged()}."
        )
    if parameters and method.dropout:
        _log.warning(
            "lora_dropout is 0 in %s, not %g: peft loads no adapters of parameters (%s) with dropout.",
            ADAPTER_CONFIG,
            method.dropout,
            parameters[0],
        )
    elif method.dropout and method.dropout_position == "post":
        _log.warning(
            "lora_dropout=%g in %s drops inputs of adapters: peft has no dropout_position='post'.",
            method.dropout,
            ADAPTER_CONFIG,
        )
    if mixers := sorted(name for name in targets if name.endswith(".mixer.out_proj")):
        _log.warning(
            "peft loads no adapter of a Mamba mixer's out_proj (%s), because transformers' kernels use its weight without "
            "calling it. To use the model in transformers, %s.",
            mixers[0],
            export_merged(),
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": method.dim,
        "lora_alpha": method.alpha,
        "lora_dropout": 0.0 if parameters else method.dropout,
        "target_modules": sorted(targets.keys() - {*parameters}),
        **({"target_parameters": parameters} if parameters else {}),  # a name that peft before 0.17 doesn't know
        "rank_pattern": ranks,
        "alpha_pattern": {name: scale * rank for name, rank in ranks.items()},
        "use_dora": isinstance(method, DoRA),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _targets(modules: Mapping[str, _Released], entries: Sequence[Entry]) -> dict[str, tuple[bool, int]]:
    """What peft is told to train: by name, whether it is a parameter, and the rank.

    transformers 5 stacks the experts of a layer, so peft trains them as parameters. It takes each module with a name of an
    expert's for an expert, shared experts and dense layers too, and drops their adapters without a message. The file
    therefore names the parameters of these modules.
    """
    released = {piece.name or "" for entry in entries for piece in entry.pieces}
    of_experts = {match["leaf"] for name in released if (match := _EXPERT.fullmatch(name))}
    are_stacked = of_experts <= _STACKED.keys()
    targets: dict[str, tuple[bool, int]] = {}
    for name, module in modules.items():
        leaf = name.rpartition(".")[2]
        theirs = name.removeprefix("backbone.")  # the prefix of Nemotron-H's release, not of its class
        expert = _EXPERT.fullmatch(f"{theirs}.weight")
        parameter, parts = (_STACKED | _STACKED_BY_PEFT).get(leaf, ("", ())) if expert is not None else ("", ())
        siblings = {name.removesuffix(leaf) + part for part in parts}
        if without := sorted(siblings - modules.keys()):
            raise ConfigError(
                f"{name} has an adapter and {without[0]} has none, but peft trains both as one parameter of all "
                f"experts. Remove the experts from peft.target_modules, or {export_merged()}."
            )
        if leaf not in of_experts or not are_stacked:
            targets[theirs] = False, module.rank
        elif expert is None:
            targets[f"{theirs}.weight"] = True, module.rank
        else:
            targets[f"{expert['layer']}.{parameter}"] = True, sum(modules[sibling].rank for sibling in siblings)
    return targets


def _write_files(folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_WEIGHTS)
    write_json(folder / ADAPTER_CONFIG, described)
