# SPDX-License-Identifier: Apache-2.0
"""Converts the rotary positions of config.json, in both of its notations, and their scaling.

The kinds that any decoder accepts (`positions`) are linear, dynamic, yarn and longrope. Llama 3.1, GPT-OSS and DeepSeek
have their own fields, and read their numbers with `scaled`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from nemo2.base.errors import ConfigError
from nemo2.models.conversion.settings import NEEDED, Config, refusal
from nemo2.models.rotary import DynamicNTK, LongRope, Stretching, Yarn

Rotary = tuple[Callable[[Config, Config], dict[str, Any]], Callable[[Any], dict[str, Any]]]
"""A function from config.json and nemo2's other settings to those of rotary positions, and one from nemo2's configuration to the
fields of config.json."""
UNROTATED: Rotary = lambda hf, settings: {}, lambda own: {}
"""For models without rotary positions."""
KINDS = ("default", "linear", "dynamic", "yarn", "longrope")
"""The kinds that `positions` reads."""
_LENGTH = "original_max_position_embeddings"
_YARN = {
    "factor": ("factor", None),
    _LENGTH: ("original_length", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "truncate": ("round_to_channels", True),
    "attention_factor": ("attention_factor", None),
    "mscale": ("mscale", None),
    "mscale_all_dim": ("mscale_all_dim", None),
}
_LONG = {
    "short_factor": ("short_factors", NEEDED),
    "long_factor": ("long_factors", NEEDED),
    "factor": ("factor", None),
    _LENGTH: ("original_length", None),
    "attention_factor": ("attention_factor", None),
}


@dataclass(frozen=True)
class Rope:
    """The rotary positions of config.json, in either of its notations."""

    theta: Any
    kind: str
    """"default", or the kind of scaling: "linear", "llama3", "yarn", ..."""
    scaling: Config
    """The parameters of the scaling."""
    partial: float
    """The share of a head's channels that is rotated."""


def rope_of(hf: Config, *, theta: float = 10_000.0, partial: float = 1.0, kinds: Sequence[str] = ("default",)) -> Rope:
    """The rotary settings from ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``.

    ``theta`` and ``partial`` are defaults.

    Raises:
        ConfigError: nemo2's model doesn't support the kind of scaling.
    """
    parameters = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = parameters.pop("rope_type", parameters.get("type", "default"))
    parameters.pop("type", None)
    if kind not in kinds:
        raise refusal(hf, _field(hf), f"nemo2's model supports the kinds {', '.join(map(repr, kinds))}, not {kind!r}")
    base = parameters.pop("rope_theta", hf.get("rope_theta", theta))
    share = parameters.pop("partial_rotary_factor", hf.get("partial_rotary_factor", partial))
    if kind in ("llama3", "yarn", "longrope") and hf.get(_LENGTH) is not None:
        parameters[_LENGTH] = hf[_LENGTH]  # takes precedence in transformers
    return Rope(theta=_whole(base), kind=kind, scaling=parameters, partial=share)


def scaled(hf: Config, rope: Rope, names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """nemo2's settings for a scaling. ``names`` maps each of its parameters to (nemo2's name, default).

    Raises:
        ConfigError: a parameter is unknown, or a parameter without a default is missing.
    """
    for name, value in rope.scaling.items():
        if name not in names and value is not None:
            raise refusal(hf, _field(hf), f"nemo2 has no setting for {name}")
    settings = {}
    for theirs, (ours, default) in names.items():
        value = rope.scaling.get(theirs)
        if value is None and default is NEEDED:
            raise ConfigError(f"config.json's rotary scaling ({rope.kind}) has no {theirs}: add it.")
        settings[ours] = default if value is None else value
    return settings


def rope_fields(
    theta: float, *, kind: str = "default", partial: Optional[float] = None, **scaling: Any
) -> dict[str, Any]:
    """The fields of rotary positions in both notations: that of transformers 4, vLLM and others, and that of transformers
    5."""
    parameters: dict[str, Any] = {"rope_type": kind, **scaling}
    fields: dict[str, Any] = {"rope_theta": float(theta), "rope_parameters": {"rope_theta": float(theta), **parameters}}
    if kind != "default":
        fields["rope_scaling"] = parameters
    if partial is not None:
        fields["partial_rotary_factor"] = fields["rope_parameters"]["partial_rotary_factor"] = partial
    return fields


def positions(hf: Config, rope: Rope, *, longest: int) -> dict[str, Any]:
    """nemo2's settings for one of `KINDS`. ``longest`` is ``max_position_embeddings``, or transformers' default for it.

    Raises:
        ConfigError: only a part of the channels is rotated, or a parameter of the scaling is missing or unknown.
    """
    if rope.partial != 1.0:
        field = next((name for name in ("partial_rotary_factor", "rope_parameters") if hf.get(name)), "rope_scaling")
        raise refusal(hf, field, "nemo2's model rotates all channels of a head")
    return partial_positions(hf, rope, longest=longest)


def partial_positions(hf: Config, rope: Rope, *, longest: int) -> dict[str, Any]:
    """`positions` for a family that may rotate a part of a head's channels. The result doesn't include ``rotary_percent``."""
    settings: dict[str, Any] = {"rotary_base": rope.theta}
    if rope.kind == "linear":
        return settings | scaled(hf, rope, {"factor": ("seq_len_interpolation_factor", NEEDED)})
    stretching = _stretching(hf, rope, longest)
    if stretching is None:
        return settings
    # Transformer Engine's fused kernel doesn't scale queries and keys by the amplitude.
    unfused = {} if stretching.amplitude == 1 else {"apply_rope_fusion": False}
    return settings | unfused | {"rope_stretching": stretching}


def _stretching(hf: Config, rope: Rope, longest: int) -> Optional[Stretching]:
    if rope.kind == "dynamic":
        return DynamicNTK(original_length=longest, **scaled(hf, rope, {"factor": ("factor", NEEDED)}))
    if rope.kind not in ("yarn", "longrope"):
        return None
    settings = scaled(hf, rope, _YARN if rope.kind == "yarn" else _LONG)
    settings["original_length"] = settings["original_length"] or longest
    # Both classes of transformers use the ratio if no factor is given, and don't shrink.
    settings["factor"] = settings["factor"] or max(1.0, longest / settings["original_length"])
    if rope.kind == "longrope":
        return LongRope(**settings)
    mscales = settings.pop("mscale"), settings.pop("mscale_all_dim")
    if settings["attention_factor"] is None and all(mscales):
        wanted, on_all = (1 + 0.1 * scale * math.log(settings["factor"]) for scale in mscales)
        settings["attention_factor"] = wanted / on_all
    return Yarn(**settings)


def positions_of(ours: Any, *, partial: Optional[float] = None) -> dict[str, Any]:
    """The inverse of `positions`. The result includes ``max_position_embeddings`` if the stretching defines it."""
    stretching = ours.rope_stretching
    if stretching is None:
        if ours.seq_len_interpolation_factor is None:
            return rope_fields(ours.rotary_base, partial=partial)
        return rope_fields(ours.rotary_base, partial=partial, kind="linear", factor=ours.seq_len_interpolation_factor)
    parameters: dict[str, Any] = {"factor": float(stretching.factor)}
    if isinstance(stretching, DynamicNTK):
        beside = {"max_position_embeddings": stretching.original_length}
        return {**rope_fields(ours.rotary_base, kind="dynamic", partial=partial, **parameters), **beside}
    kind, names = ("yarn", _YARN) if isinstance(stretching, Yarn) else ("longrope", _LONG)
    parameters |= {
        theirs: getattr(stretching, name) for theirs, (name, _) in names.items() if hasattr(stretching, name)
    }
    parameters = {name: value for name, value in parameters.items() if value is not None}
    return rope_fields(ours.rotary_base, kind=kind, partial=partial, **parameters)


def any_scaling(
    *,
    theta: float = 10_000.0,
    partial: Optional[float] = None,
    own: Optional[tuple[str, Mapping[str, tuple[str, Any]]]] = None,
) -> Rotary:
    """`positions` and its inverse.

    Args:
        theta: The rotary base if config.json omits it.
        partial: The share of rotated channels if config.json omits it. None: all, and no other share is supported.
        own: A further kind, and its parameters as in `scaled`: nemo2's configuration has these fields if it is scaled so. None:
            there is none.
    """
    further, names = own or (None, {})

    def ours(hf: Config, settings: Config) -> dict[str, Any]:
        kinds = KINDS if further is None else (*KINDS, further)
        rope = rope_of(hf, theta=theta, partial=1.0 if partial is None else partial, kinds=kinds)
        share = {} if partial is None else {"rotary_percent": rope.partial}
        read = positions if partial is None else partial_positions
        scaling = scaled(hf, rope, names) if rope.kind == further else {}
        return {"rope_stretching": None, **read(hf, rope, longest=settings["seq_length"]), **share, **scaling}

    def theirs(config: Any) -> dict[str, Any]:
        if further is not None and all(hasattr(config, name) for name, _ in names.values()):
            return rope_fields(config.rotary_base, kind=further, **parameters_of(config, names))
        return positions_of(config, partial=None if partial is None else config.rotary_percent)

    return ours, theirs


def own_scaling(
    kind: str, names: Mapping[str, tuple[str, Any]], *, on: Config, off: Config, theta: float = 10_000.0
) -> Rotary:
    """Positions that are not stretched, or stretched by the one kind that a family has fields of its own for.

    Args:
        names: The parameters of the scaling, as in `scaled`.
        on, off: nemo2's settings that switch the scaling on, and off.
        theta: The rotary base if config.json omits it.
    """

    def ours(hf: Config, settings: Config) -> dict[str, Any]:
        rope = rope_of(hf, theta=theta, kinds=("default", kind))
        return {"rotary_base": rope.theta, **({**on, **scaled(hf, rope, names)} if rope.kind == kind else off)}

    def theirs(own: Any) -> dict[str, Any]:
        if any(getattr(own, name) != value for name, value in on.items()):
            return rope_fields(own.rotary_base)
        return rope_fields(own.rotary_base, kind=kind, **parameters_of(own, names))

    return ours, theirs


def parameters_of(ours: Any, names: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The inverse of `scaled`."""
    return {theirs: getattr(ours, name) for theirs, (name, _) in names.items()}


def _field(hf: Config) -> str:
    return "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"


def _whole(value: Any) -> Any:
    """``value`` as an integer if it is a whole float, because JSON may write a rotary base as 10000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1 else value
