# SPDX-License-Identifier: Apache-2.0
"""Reads the files of an adapter of Hugging Face's ``peft``, ``adapter_config.json`` and ``adapter_model.safetensors``,
and refuses features that nemo2 lacks."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from torch import Tensor

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.foreign_files import read_object, refuse_outside
from nemo2.hugging_face.adapter_rows import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from nemo2.hugging_face.quantised import mapped
from nemo2.hugging_face.safetensors_files import read_header

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
         "base_model_name_or_path", "revision"}  # fmt: skip
_WHOLE = re.compile(r"base_model\.model\.(?P<name>.+\.\w+)")
_SAID_BY_THE_TENSORS = {
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "ensure_weight_tying",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
}
_OF_NO_CONSEQUENCE = {"inference_mode", "peft_version", "megatron_core", "qalora_group_size", "runtime_config",
                      "auto_mapping", "eva_config"}  # fmt: skip
_TAKEN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""The supported values of fields. They leave the base weights unchanged; other initialisations also change the base."""


@dataclass(kw_only=True)
class Adapter:
    """The factors of a released module."""

    first: Tensor
    """``lora_A``, ``[rank, inputs]``."""
    second: Tensor
    """``lora_B``, ``[outputs, rank]``."""
    scale: float
    lengths: Optional[Tensor] = None
    """DoRA's magnitudes, ``[outputs]``. None: the adapter is LoRA."""


def read_adapters(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """The adapters in a folder by released module, and the released tensors that were trained in full
    (``modules_to_save``) by name. ``settings`` as returned by `read_settings`.

    Raises:
        CheckpointError: the weights are missing, a pickle, or don't belong to the settings.
        ConfigError: they contain something that nemo2's adapters don't support.
        SecurityError: the file leads out of the folder.
    """
    if not os.path.lexists(folder / ADAPTER_WEIGHTS):
        pickles = sorted(file.name for file in folder.glob("adapter_model*.bin"))
        why = (
            f"its weights are a pickle ({pickles[0]}), and loading a pickle can run code. nemo2 reads safetensors "
            "only. If you trust the file, load it with peft and save it again (save_pretrained)."
            if pickles
            else f"there is no {ADAPTER_WEIGHTS}."
        )
        raise CheckpointError(f"{folder}: {why}")
    refuse_outside(folder, ADAPTER_WEIGHTS)
    tensors = {name: mapped(stored) for name, stored in read_header(folder / ADAPTER_WEIGHTS).items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS}: {name} contains values that are not finite numbers ({tensor.dtype})."
            )
    factors, whole = {}, {}
    for name, tensor in tensors.items():
        match = None if "lora_" in name else _WHOLE.fullmatch(name)
        if match is None:
            factors[name] = tensor
        else:
            whole[match["name"]] = tensor
    return _by_module(factors, settings, folder), whole


def read_settings(folder: Path) -> dict[str, Any]:
    """The contents of ``adapter_config.json``.

    Raises:
        CheckpointError: the file isn't a JSON object.
        ConfigError: a field requests a feature that nemo2's LoRA and DoRA lack.
        SecurityError: the file leads out of the folder.
    """
    settings = read_object(folder, ADAPTER_CONFIG)
    fields = _READ | _SAID_BY_THE_TENSORS | _OF_NO_CONSEQUENCE
    for name, value in settings.items():
        taken = _TAKEN.get(name)
        if name not in fields and (value not in taken if taken else value):
            allowed = " or ".join(map(repr, taken)) if taken else "left unset"
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: nemo2's LoRA and DoRA do not support {name}={value!r}; it must be "
                f"{allowed}. Merge the adapter in peft (merge_and_unload), and import the model."
            )
    if settings.get("peft_type") is None:
        raise ConfigError(f"{folder / ADAPTER_CONFIG}: peft_type is missing. It must be 'LORA', also for DoRA.")
    for name, kinds in (("r", int), ("lora_alpha", int | float), ("lora_dropout", int | float | None)):
        if not isinstance(settings.get(name), kinds):
            raise ConfigError(f"{folder / ADAPTER_CONFIG}: {name}={settings.get(name)!r} must be a number.")
    if settings["r"] < 1:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG}: r={settings['r']}: the rank of an adapter must be a whole number of at least "
            "1."
        )
    return settings


def _by_module(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], folder: Path) -> dict[str, Adapter]:
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{folder / ADAPTER_WEIGHTS}: {name} is neither an adapter of a linear layer nor a tensor of "
                "modules_to_save, and nemo2's adapters support nothing else. Merge the adapter in peft, and import "
                "the model."
            )
        if re.search(r"\.experts(\.base_layer)*$", match["module"]):
            raise ConfigError(
                f"{folder / ADAPTER_WEIGHTS}: {name} adapts all experts of a layer as one parameter "
                f"(target_parameters={settings.get('target_parameters')}), which nemo2's LoRA doesn't. Merge the adapter in peft "
                "(merge_and_unload), and import the model."
            )
        modules.setdefault(match["module"], {})[match["kind"]] = tensor
    if not modules:
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} contains no LoRA factors.")
    wanted = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if settings.get("use_dora") else set())
    for module, parts in modules.items():
        if parts.keys() != wanted:
            off = ", ".join(sorted(parts.keys() ^ wanted))
            dora = settings.get("use_dora", False)
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS}: {module} {'lacks' if wanted - parts.keys() else 'has'} {off}, and "
                f"{ADAPTER_CONFIG} says use_dora={dora}: the files don't belong together."
            )
    return {module: _adapter(module, parts, settings, folder) for module, parts in modules.items()}


def _adapter(module: str, parts: Mapping[str, Tensor], settings: Mapping[str, Any], folder: Path) -> Adapter:
    first, second = parts["lora_A"], parts["lora_B"]
    parameter = f"{module}.weight"  # by which patterns find the parameters of target_parameters
    by_parameter = any(f".{parameter}".endswith(f".{one}") for one in settings.get("target_parameters") or ())
    name = parameter if by_parameter else module
    rank = _by_pattern(settings, "rank_pattern", name, settings["r"])
    if first.dim() != 2 or second.dim() != 2 or not first.shape[0] == second.shape[1] == rank:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS}: the factors of {module} have shapes {list(first.shape)} and {list(second.shape)}, and "
            f"{ADAPTER_CONFIG} gives it rank {rank}: the files don't belong together."
        )
    alpha = _by_pattern(settings, "alpha_pattern", name, settings["lora_alpha"])
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    lengths = parts.get("lora_magnitude_vector")
    return Adapter(
        first=first, second=second, scale=alpha / divisor, lengths=None if lengths is None else lengths.flatten()
    )


def _by_pattern(settings: Mapping[str, Any], field: str, name: str, otherwise: float) -> Any:
    """The value of the first pattern that matches the end of a name, as in peft."""
    for pattern, value in (settings.get(field) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise ConfigError(
                f"{ADAPTER_CONFIG}: {field} has the key {pattern!r}, which is not a regular expression: {error}."
            ) from error
    return otherwise
