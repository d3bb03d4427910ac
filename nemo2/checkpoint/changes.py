# SPDX-License-Identifier: Apache-2.0
"""Finds the changes in a recipe since it wrote the checkpoint that it resumes from.

The checkpoint's ``context/`` describes the model, data, optimizer and tokenizer at that time. Its manifest has the
precision, the seed and the vocabulary. Each difference is of one of three kinds. *Harmless*: speed, or the location of
files. *Changes the result*: training continues, but differently. *Doesn't fit*: the weights would be truncated, padded
with zeros, or change their meaning; this is rejected unless the user accepts it.
"""

import contextlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fiddle as fdl

from nemo2.base.advice import advice, new_name
from nemo2.base.errors import CheckpointError
from nemo2.base.names import listed
from nemo2.checkpoint.context import (
    INPUTS,
    TOKENIZER_FILES,
    described,
    described_parts,
    load_context,
    settings_of,
    tokenizer_settings,
)
from nemo2.checkpoint.directory import CONTEXT_PATH, WEIGHTS_PATH, read_manifest, sha256
from nemo2.checkpoint.metadata import stacks_layers
from nemo2.config.aliases import parameter_names
from nemo2.config.show import TARGET, diff
from nemo2.data.base import MegatronDataModule
from nemo2.data.tokenizer_files import FIELDS, files_of
from nemo2.models.conversion.settings import TRAINED_OTHERWISE, contradicted, contradictions
from nemo2.models.hybrid_pattern import without_stages

_log = logging.getLogger(__name__)

_SHAPE_FIELDS = re.compile(
    r"\b(?P<size>hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|num_moe_experts"
    r"|moe_ffn_hidden_size|moe_shared_expert_intermediate_size|(?:q|kv)_lora_rank|model_transform\.dim)$"
    r"|(num_layers|hidden_size|num_attention_heads|num_query_groups|kv_channels|vocab_size|num_moe_experts"
    r"|moe_layer_freq|gated_linear_unit|add_bias_linear|add_qkv_bias|normalization|qk_layernorm|position_embedding_type"
    r"|moe_shared_expert_intermediate_size|share_embeddings_and_output_weights|multi_latent_attention|(q|kv)_lora_rank"
    r"|qk_head_dim|qk_pos_emb_head_dim|v_head_dim|mtp_num_layers|hybrid_override_pattern|mamba_(state_dim|head_dim|num_\w+)"
    r"|attention_output_gate|linear_(attention_freq|conv_kernel_dim|(key|value)_head_dim|num_(key|value)_heads))$"
    r"|^model_transform\.(target_modules|exclude_modules|modules_to_save)$"
    rf"|^(?!.*overlap).*{TARGET}$"
)
"""Fields of a model that decide its parameters and their sizes. "class" stands for the model's class.
``size``: those that decide the shape of a weight in every family, whatever the strictness of loading."""
_HARMLESS = re.compile(
    r"recompute_|fusion|overlap|attention_backend|transformer_impl|cuda_graph|offload|num_workers|pin_memory|persistent_workers"
    r"|prefetch|index_mapping_dir|mmap_bin_files|num_dataset_builder_threads|init_method|perform_initialization"
    r"|use_cpu_initialization|deallocate_|distribute_saved|make_vocab_size_divisible_by|token_dispatcher|nccl_|wgrad_deferral"
    r"|barrier_with|batch_p2p|log_|timers|^max_steps$"
)
_DECIDED_ELSEWHERE = re.compile(r"(_parallel_size|_parallel|(?<!main_)params_dtype|pipeline_dtype|autocast_dtype)$")
"""Fields that aren't compared here: the layout, which may change freely, and the precision."""
_HASH = re.compile("[0-9a-f]{32,}")


class Difference(NamedTuple):
    """A field that differs, or a file (without values, ``field`` says how)."""

    part: str
    field: str
    before: Any = None
    now: Any = None

    @property
    def of_shapes(self) -> bool:
        """Whether weights have other shapes."""
        match = _SHAPE_FIELDS.search(self.field)
        return bool(match and match["size"]) and None not in (self.before, self.now)

    def __str__(self) -> str:
        if self.before is self.now is None:
            return f"{self.part}: {self.field}"
        return f"{self.part}.{self.field}: {_shown(self.before)} -> {_shown(self.now)}"


@dataclass(kw_only=True)
class Changes:
    """The differences by kind."""

    harmless: list[Difference] = field(default_factory=list)
    result: list[Difference] = field(default_factory=list)
    unfit: list[Difference] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.harmless or self.result or self.unfit)

    def to_dict(self) -> dict[str, list[str]]:
        """The differences by kind as text, for JSON."""
        return {kind: list(map(str, differences)) for kind, differences in vars(self).items()}

    def lines(self) -> Iterator[str]:
        """The differences as sentences, the most serious first."""
        for kind, differences in (
            ("doesn't fit the checkpoint", self.unfit),
            ("changes the result", self.result),
            ("harmless", self.harmless),
        ):
            yield from (f"{kind}: {line}" for line in differences)


def changes_since(checkpoint: Path, trainer: Any) -> Changes:
    """The differences between the run of ``trainer``, whose model is set up, and the run that wrote ``checkpoint``.

    Parts that the checkpoint doesn't describe, or whose classes can't be imported here, aren't compared.
    """
    changes = Changes()
    manifest = read_manifest(checkpoint)
    before = manifest.settings if manifest is not None else {}
    _compare_inputs(changes, before.get(INPUTS), getattr(trainer, "datamodule", None))
    _compare_settings(changes, before, settings_of(trainer))
    deciding = _contradictions(checkpoint, trainer.lightning_module)
    for part, config in described_parts(trainer).items():
        try:
            stored = load_context(checkpoint, part, build=False)
            _join_names(*(getattr(one, "model_transform", None) for one in (stored, config)))
            differing = diff(stored, config)
        # There is no description, or its classes can't be imported. Training doesn't need the comparison.
        except Exception:
            continue
        copies = checkpoint / CONTEXT_PATH / TOKENIZER_FILES
        files = files_of(config) if part == "tokenizer" and copies.is_dir() else {}
        for change in differing:
            # Files are compared by content: those of the checkpoint are copies.
            if not _DECIDED_ELSEWHERE.search(change.path) and not (files and change.path in FIELDS):
                _sort(changes, part, change.path, change.old, change.new, deciding=deciding)
        if files:
            _compare_files(changes, copies, files)
    return changes


def _compare_inputs(changes: Changes, before: Any, data: Any) -> None:
    """Compare the files of the run's data with the records in the checkpoint. Nobody has set the change, and the
    position in the data belongs to the earlier contents, so other contents of training data don't fit."""
    if not isinstance(before, dict) or not isinstance(data, MegatronDataModule):
        return
    for compared in data.compare_inputs(before):
        if compared.change is not None:
            kind = changes.unfit if compared.proven and compared.now.trains else changes.result
            kind.append(Difference("data", f"{compared.now.path} {compared.change}"))


def _compare_settings(changes: Changes, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if name in before and before[name] != value:
            part = "tokenizer" if name.startswith("tokenizer_") else "trainer"
            _sort(changes, part, name, before[name], value)


def _join_names(*methods: Any) -> None:
    """Make one text of each list of names of PEFT methods' configs, as the methods take it: with the default, and in any
    order."""
    for method in methods:
        with contextlib.suppress(Exception):  # of a user's class, whose lists are compared as they are
            for name, value in vars(fdl.build(method)).items() if isinstance(method, fdl.Buildable) else ():
                if isinstance(value, list) and name in parameter_names(method.__fn_or_cls__):
                    setattr(method, name, ", ".join(sorted({*value})))


def unfit_changes(checkpoint: Path, *, model_config: Any, tokenizer: Any, method: Any = None) -> list[Difference]:
    """The changes that `changes_since` would find unfit, as far as a model's configuration and a tokenizer show them
    before the model exists.

    Args:
        model_config: The settled configuration. None: it is unknown.
        tokenizer: The run's tokenizer. None: it has none, or it is unknown.
        method: The run's PEFT method. None: it has none, or it is unknown.
    """
    changes = Changes()
    manifest = read_manifest(checkpoint)
    before = manifest.settings if manifest is not None else {}
    now = {} if tokenizer is None else tokenizer_settings(tokenizer)
    _compare_settings(changes, before, {name: value for name, value in now.items() if value})
    with contextlib.suppress(Exception):  # as in `changes_since`
        stored = load_context(checkpoint, "model", build=False)
        for name, one in {"config": model_config, "model_transform": method}.items():
            old, new = getattr(stored, name, None), None if one is None else described(one)
            if name == "model_transform":
                _join_names(old, new)
            for change in diff(old, new) if None not in (old, new) else ():
                if not _DECIDED_ELSEWHERE.search(change.path):
                    _sort(changes, "model", f"{name}.{change.path}", change.old, change.new)
    return changes.unfit


def refuse_other_shapes(checkpoint: Path, model_config: Any, method: Any = None, *, name: str) -> None:
    """Check that the weights in ``checkpoint``, from which a run starts, have the sizes of its model. ``name``: the setting and
    the checkpoint as the user wrote them.

    Raises:
        CheckpointError: weights have other shapes.
    """
    changes = unfit_changes(checkpoint, model_config=model_config, tokenizer=None, method=method)
    other = [
        change
        for change in changes
        if change.of_shapes or (change.field == "config.num_layers" and stacks_layers(checkpoint / WEIGHTS_PATH))
    ]
    if other:
        raise CheckpointError(
            f"{name}: these weights belong to another model: {'; '.join(map(str, other))}. Set the path of weights of this "
            "model, or the sizes of the weights."
        )


def warn_if_trained_otherwise(checkpoint: Path, model_config: Any, method: Any = None, *, name: Any) -> None:
    """Warn of the settings of a model that compute something else than the model of the weights in ``checkpoint``, from which
    it starts. Nothing is known about a checkpoint that doesn't describe its model. ``name``: the checkpoint's in the warning.
    ``method``: the run's PEFT method, whose ``alpha`` scales the adapters in ``checkpoint``. None: it has none."""
    try:
        trained = load_context(checkpoint, "model")
        sentences = [contradicted(model_config, trained.config, "their model")]
    except Exception:  # as in `changes_since`
        return
    now, before = (getattr(one, "alpha", None) for one in (method, trained.model_transform))
    if None not in (now, before) and now != before:
        sentences.append(f"peft.alpha={now!r} where their adapters were trained with {before!r}")
    if any(sentences):
        _log.warning(TRAINED_OTHERWISE, name, ", ".join(filter(None, sentences)))


def unfit_message(checkpoint: Path, unfit: list[Difference]) -> str:
    """The error that a run with ``unfit`` changes doesn't resume from ``checkpoint``."""
    return (
        f"The recipe doesn't fit {checkpoint}, from which the run would resume "
        f"({listed(map(str, unfit), 3, separator='; ')}). For a second experiment, {new_name()}. To resume anyway, "
        f"{advice('use --accept-changes', 'set resume.accept_changes=True')}."
    )


def _contradictions(checkpoint: Path, model: Any) -> Collection[str]:
    """The fields by which ``model`` computes something else than the model in ``checkpoint``. Empty too: it isn't described."""
    try:
        return contradictions(model.config, load_context(checkpoint, "model").config)
    except Exception:  # as in `changes_since`
        return ()


def _sort(changes: Changes, part: str, path: str, old: Any, new: Any, *, deciding: Collection[str] = ()) -> None:
    """Add a difference to ``changes``. ``deciding``: fields of the model by which it computes something else now."""
    if path.endswith("hybrid_override_pattern") and without_stages(str(old)) == without_stages(str(new)):
        return
    difference = Difference(part, path, old, new)
    if part == "tokenizer" or (part == "model" and _SHAPE_FIELDS.search(path)):
        changes.unfit.append(difference)
    elif _HARMLESS.search(path) and path.removeprefix("config.") not in deciding:
        changes.harmless.append(difference)
    else:
        changes.result.append(difference)


def _shown(value: Any) -> Any:
    """A value as text. A function is shown by name, because its repr has an address, and a hash by its beginning."""
    return _HASH.sub(lambda match: match[0][:8], str(getattr(value, "__name__", value)))


def _compare_files(changes: Changes, copies: Path, files: Mapping[str, Path]) -> None:
    """Compare the files of a tokenizer, which may have moved, with the copies in the checkpoint."""
    for file in sorted(item for item in copies.iterdir() if item.is_file()):
        now = next(iter(files.values())) if len(files) == 1 else files.get(file.name)
        if now is None:
            gone = f"{file.name} no longer exists in {next(iter(files.values())).parent}"
            changes.unfit.append(Difference("tokenizer", gone))
        elif sha256(now) != sha256(file):
            changes.unfit.append(Difference("tokenizer", f"{now} is not the file that the checkpoint was trained with"))
