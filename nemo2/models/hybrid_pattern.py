# SPDX-License-Identifier: Apache-2.0
"""The pattern of a hybrid's layers, one letter per layer, as the installed Megatron-Core reads it."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

from nemo2.base.errors import ConfigError

ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


class HybridPattern(NamedTuple):
    """The kinds of layers by letter: those of the decoder, and those of each depth of multi-token prediction."""

    decoder: str
    further: tuple[str, ...] = ()


def hybrid_pattern(config: Any) -> Optional[HybridPattern]:
    """The layers of a hybrid, without the pipeline separators (``|``). None: another kind of model.

    Megatron-Core's parser reads the pattern if it has one (0.19). Earlier versions use the same grammar without its
    checks. Without a pattern Megatron-Core distributes the kinds by the two ratios.

    Raises:
        ConfigError: Megatron-Core rejects the pattern.
    """
    if not hasattr(config, "hybrid_override_pattern"):
        return None
    allocation = _allocation()
    pattern = config.hybrid_override_pattern
    if pattern is None:
        ratios = (getattr(config, name, None) or 0.0 for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"))
        spread: Any = getattr(allocation, "pattern_from_ratios", None) or allocation.allocate_layers
        return HybridPattern("".join(spread(config.num_layers, *ratios)))
    parse: Any = getattr(allocation, "parse_hybrid_pattern", None)
    try:
        if parse is None:
            main, *predictions = pattern.split("/")
            further = tuple(part for part in predictions if part)
        else:
            parsed = parse(pattern)
            main, further = parsed.main_pattern or "", (parsed.mtp_pattern or "",) * parsed.mtp_num_depths
    except ValueError as error:
        raise ConfigError(f"model.config.hybrid_override_pattern={pattern!r}: {error}") from error
    # Megatron-Core builds the additional predictions only if the config requests them too.
    return HybridPattern(without_stages(main), further if getattr(config, "mtp_num_layers", None) else ())


def without_stages(pattern: str) -> str:
    """A pattern without its pipeline separators: the layers of a model, without the stages of a layout."""
    return pattern.replace("|", "")


def pattern_problems(config: Any) -> Iterator[str]:
    """Layers of a hybrid's pattern that the installed Megatron-Core would not build."""
    allocation = _allocation()
    pattern: Optional[str] = getattr(config, "hybrid_override_pattern", None)
    try:
        layers = hybrid_pattern(config) if pattern is not None else None
    except ConfigError as error:
        yield str(error)
        return
    requested, depths = getattr(config, "mtp_num_layers", None), len(layers.further) if layers else 0
    if requested and requested != depths:
        yield (
            f"model.config.mtp_num_layers={requested}, but model.config.hybrid_override_pattern has the layers of {depths} "
            "additional predictions, each after a '/'. Set both to the same number."
        )
    if pattern is None or layers is None:
        return
    if len(layers.decoder) != config.num_layers:
        yield (
            f"model.config.hybrid_override_pattern names {len(layers.decoder)} layers, but "
            f"model.config.num_layers={config.num_layers}. Set both to the same number of layers."
        )
    if hasattr(allocation, "parse_hybrid_pattern"):
        return
    marks = [mark for mark in "|/" if mark in pattern]
    if marks:
        yield (
            f"model.config.hybrid_override_pattern={pattern!r} contains {' and '.join(map(repr, marks))}, which "
            "separates pipeline stages or prediction heads and requires Megatron-Core 0.19. Remove it from the "
            "pattern, or install Megatron-Core 0.19."
        )
    unknown = sorted({*pattern} - {*allocation.Symbols.VALID} - {*marks})
    if unknown:
        yield (
            f"model.config.hybrid_override_pattern={pattern!r} contains the layers {', '.join(map(repr, unknown))}, "
            f"but the installed Megatron-Core knows only {' '.join(sorted(allocation.Symbols.VALID))}."
        )


def uncut_hybrid_problems(pattern: Optional[str], stages: int, setting: Callable[[str], Any]) -> Iterator[str]:
    """Pipeline settings that Megatron-Core ignores when it distributes a hybrid's layers to several ``stages``, or rejects beside
    the stages of its ``pattern``. ``setting`` returns the value of a setting by name."""
    if stages == 1:
        return
    names = (f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))
    for name in (*names, "pipeline_model_parallel_layout"):
        if value := setting(name):
            yield (
                f"strategy.{name}={value!r}: Megatron-Core ignores this setting for hybrid models, and would build "
                "other stages than requested. Leave it unset, and set num_layers_in_first_pipeline_stage or "
                "num_layers_in_last_pipeline_stage."
            )
    for name in ENDS if "|" in (pattern or "") else ():
        if setting(name) is not None:
            yield (
                f"strategy.{name}={setting(name)}: model.config.hybrid_override_pattern={pattern!r} writes the stages out. Leave "
                "it unset, or remove the '|'."
            )


def left_out_layers(config: Any) -> Optional[str]:
    """Why the pipeline stages of a hybrid would not hold all its layers together. None: they do.

    Megatron-Core 0.16 builds such a model without an error.
    """
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    ends = [getattr(config, name) for name in ENDS]
    if problem := unbuilt_stages(config.hybrid_override_pattern, stages, chunks):
        return problem
    if stages == 1 or "|" in (config.hybrid_override_pattern or ""):
        return None
    stated = [size for size in ends if size is not None]
    between, layers = stages - len(stated), config.num_layers - sum(stated)
    if layers >= 0 and (layers % between == 0 if between else layers == 0):
        return None
    beside = f" after the first and last stages' {stated}" if stated else ""
    return (
        f"strategy.pipeline_model_parallel_size={stages}: model.config.num_layers={config.num_layers} leaves {layers} "
        f"layers for {between} stages{beside}, which cannot be split evenly. Set a pipeline-parallel size that "
        "divides them, or other values for num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage."
    )


def unbuilt_stages(pattern: Optional[str], stages: int, chunks: Optional[int]) -> Optional[str]:
    """Why a pipeline of so many ``stages`` would not build those that a pattern writes out with ``|``. None: it does, or none are
    written out. Megatron-Core gives each chunk of a rank the part of its number, and builds no other.

    Args:
        chunks: The virtual stages of each stage, which only a pattern can write out. None: there are none.
    """
    parts = len(str(pattern or "").partition("/")[0].split("|"))
    chunks = chunks if stages > 1 else None
    if parts == stages * (chunks or 1) or (parts == 1 and chunks is None):
        return None
    if parts == 1:
        return (
            f"strategy.virtual_pipeline_model_parallel_size={chunks}: only the pattern of a hybrid model splits it into virtual "
            f"stages. Leave it unset, or separate {stages * (chunks or 1)} stages by '|' in model.config.hybrid_override_pattern "
            "(Megatron-Core 0.19)."
        )
    beside, fix = "", f"Set pipeline_model_parallel_size={parts}, or move"
    if chunks is not None:
        size = parts // stages if parts > stages else None
        beside = f" and virtual_pipeline_model_parallel_size={chunks}"
        fix = "Move" if parts % stages else f"Set virtual_pipeline_model_parallel_size={size}, or move"
    return (
        f"model.config.hybrid_override_pattern={pattern!r} has {parts} stages, but "
        f"strategy.pipeline_model_parallel_size={stages}{beside}. {fix} or remove the '|'."
    )


def _allocation() -> Any:
    """Megatron-Core's module of hybrid patterns, whose names differ between versions."""
    return importlib.import_module("megatron.core.ssm.mamba_hybrid_layer_allocation")
