# SPDX-License-Identifier: Apache-2.0
"""Userbuffer settings: how each GEMM of a transformer layer overlaps its tensor-parallel communication.

Names and fields are NeMo 2.0's. A layer has four linear modules (qkv, proj, fc1, fc2). Each has a forward GEMM (fprop)
and two in the backward: for the input (dgrad) and for the weight (wgrad). The methods that a GEMM supports are
Transformer Engine's rule (``initialize_ub`` in transformer_engine/pytorch/module/base.py):

- *bulk*: the whole exchange runs during a GEMM that doesn't need its result. For dgrad and wgrad of qkv and fc1.
- *ring exchange*: the GEMM is split by rank, and chunks travel around the ring. For gathers and reduce-scatters.
- *pipeline*: the GEMM is divided into ``num_splits`` parts, each followed by its reduce-scatter. For reduce-scatters
  only.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, Optional, TypeVar, Union

from nemo2.base.counts import count_problems
from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.config.capture import configurable

GATHERS = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
"""GEMMs that wait for an all-gather of their input."""
SCATTERS = ("proj_fprop", "fc2_fprop")
"""GEMMs whose output is reduce-scattered."""
BESIDE = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
"""GEMMs during which another GEMM's exchange can run. The outputs of the dgrads can also be reduce-scattered."""


@dataclasses.dataclass
class TPOverlapCfg:
    """Base class of the three overlap methods."""


@configurable
@dataclasses.dataclass
class BulkOverlapCfg(TPOverlapCfg):
    """Run the whole exchange during a GEMM that doesn't need its result."""

    num_sm: int
    """Streaming multiprocessors that run the exchange."""
    cga_size: int
    """Multiprocessors per cluster of the exchange."""
    set_sm_margin: bool
    """Keep the GEMM off the multiprocessors of the exchange."""
    method: Literal["bulk"] = "bulk"
    """The method's name in Transformer Engine."""


@configurable
@dataclasses.dataclass
class RingExchangeOverlapCfg(TPOverlapCfg):
    """Compute the GEMM in chunks, one per rank, while their inputs or outputs travel around the ring."""

    aggregate: bool = False
    """Process two chunks at a time."""
    method: Literal["ring_exchange"] = "ring_exchange"
    """The method's name in Transformer Engine."""
    num_sm: int = 1
    """Streaming multiprocessors that run the exchange."""
    cga_size: int = 1
    """Multiprocessors per cluster of the exchange."""
    set_sm_margin: bool = False
    """Keep the GEMM off the multiprocessors of the exchange."""
    fp8_buf: bool = False
    """Exchange in fp8."""
    atomic_gemm: bool = False
    """Run one kernel that waits for chunks itself, rather than one kernel per chunk. Needs fp8."""


@configurable
@dataclasses.dataclass
class PipelineOverlapCfg(TPOverlapCfg):
    """Compute the GEMM in ``num_splits`` parts, each reduce-scattered while the next part is computed."""

    num_sm: int
    """Streaming multiprocessors that run the exchange."""
    cga_size: int
    """Multiprocessors per cluster of the exchange."""
    num_splits: int
    """Parts of the GEMM."""
    set_sm_margin: bool
    """Keep the GEMM off the multiprocessors of the exchange."""
    # NeMo's default is a tuple by a typing error, which counts as True. False was intended.
    fp8_buf: bool = False
    """Exchange in fp8."""
    atomic_gemm: bool = False
    """Run one kernel that waits for chunks itself, rather than one kernel per chunk. Needs fp8."""
    method: Literal["pipeline"] = "pipeline"
    """The method's name in Transformer Engine."""


_Settings = Optional[Union[TPOverlapCfg, dict[str, Any]]]


_Class = TypeVar("_Class", bound=type)


def _validated(of: _Class) -> _Class:
    """Check each object when it is created, but not in ``__post_init__``.

    NeMo's scripts make configs of these settings with `fiddle.experimental.dataclasses`, which rejects a class with
    that method.
    """
    original_init = of.__init__

    @functools.wraps(original_init)
    def validated_init(self: Any, *arguments: Any, **named: Any) -> None:
        original_init(self, *arguments, **named)
        userbuffer_settings(self)

    of.__init__ = validated_init
    return of


@configurable
@_validated
@dataclasses.dataclass
class TransformerLayerTPOverlapCfg:
    """Set the overlap method of each GEMM. None: the GEMM's exchange isn't overlapped. `nemo2.mcore.overlap.tp_switches` says
    which GEMMs can be off individually.

    Raises:
        ConfigError: a method that a GEMM doesn't support, or sizes that aren't positive numbers. The message lists all
            problems.
    """

    qkv_dgrad: _Settings = None
    """Gradient of the input of the query, key and value projection."""
    qkv_wgrad: _Settings = None
    """Gradient of the weight of the query, key and value projection."""
    fc1_dgrad: _Settings = None
    """Gradient of the input of the first layer of the MLP."""
    fc1_wgrad: _Settings = None
    """Gradient of the weight of the first layer of the MLP."""
    qkv_fprop: _Settings = None
    """Forward of the query, key and value projection."""
    proj_dgrad: _Settings = None
    """Gradient of the input of the attention's output projection."""
    fc1_fprop: _Settings = None
    """Forward of the first layer of the MLP."""
    fc2_dgrad: _Settings = None
    """Gradient of the input of the second layer of the MLP."""
    proj_fprop: _Settings = None
    """Forward of the attention's output projection."""
    fc2_fprop: _Settings = None
    """Forward of the second layer of the MLP."""


def userbuffer_settings(settings: Any, *, quantized: bool = True) -> Optional[dict[str, Any]]:
    """Settings in Transformer Engine's format, ``{"qkv_fprop": {"method": ..., "num_sm": ...}}``, without entries of
    None.

    Args:
        settings: A `TransformerLayerTPOverlapCfg`, a mapping of GEMMs to settings, or None for no settings.
        quantized: Whether GEMMs run in fp8. False: ``atomic_gemm`` is rejected.

    Raises:
        ConfigError: an unknown GEMM, or settings that Transformer Engine would reject when it starts. The message lists
            all problems.
    """
    if settings is None:
        return None
    by_gemm = _fields(settings)
    if by_gemm is None:
        raise ConfigError(
            f"{_NAME}={settings!r} must be a TransformerLayerTPOverlapCfg, the name of a preset, or a dict of GEMM names "
            "(such as qkv_fprop) to settings."
        )
    plain = {gemm: _fields(value) for gemm, value in by_gemm.items() if value is not None}
    problems = [problem for gemm, value in plain.items() for problem in _problems(gemm, value, plain, quantized)]
    if problems:
        raise ConfigError("\n".join(problems))
    return plain


def settings_per_mode(settings: Optional[dict[str, Any]], modes: int) -> Any:
    """`userbuffer_settings` for ``modes`` sets of buffers. The second set is for layers in 16 bits.

    ``initialize_ub`` moves a dgrad that isn't in bulk from one of its lists to another when it reads the method, and
    fails if a second set repeats the method.

    Raises:
        ConfigError: ``atomic_gemm``, which is for 8 bits, and whose pairs are one list for all sets.
    """
    if settings is None or modes == 1:
        return settings
    for gemm, entry in settings.items():
        if entry.get("atomic_gemm"):
            raise ConfigError(
                f"{_NAME}.{gemm}.atomic_gemm=True with trainer.plugins.first_last_layers_bf16=True: layers in 16 bits "
                "do not support atomic GEMMs, and Transformer Engine uses one setting for all layers. Set one of the "
                "two to False."
            )
    second = {gemm: dict(entry) for gemm, entry in settings.items()}
    for gemm in ("qkv_dgrad", "fc1_dgrad"):
        if second.get(gemm, {}).get("method", "bulk") != "bulk":
            del second[gemm]["method"]
    return [settings, second]


def settings_by_gemm(settings: Any) -> dict[str, Optional[dict[str, Any]]]:
    """Settings by GEMM, with None for GEMMs that are off. GEMMs that a dict omits, and all GEMMs for None, use
    Transformer Engine's settings."""
    by_gemm = {} if settings is None else _fields(settings) or {}
    return {gemm: None if value is None else _fields(value) or {} for gemm, value in by_gemm.items()}


_NAME = "MegatronCommOverlapCallback.tp_comm_overlap_cfg"


def _fields(settings: Any) -> Optional[dict[str, Any]]:
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return dict(settings) if isinstance(settings, Mapping) else None


def _problems(gemm: str, value: Optional[dict[str, Any]], layer: Mapping[str, Any], quantized: bool) -> list[str]:
    gemms = (*GATHERS, *SCATTERS, *BESIDE)
    if gemm not in gemms:
        return [f"{_NAME}.{gemm}: Transformer Engine has no such GEMM{did_you_mean(gemm, gemms)}"]
    if value is None:
        return [
            f"{_NAME}.{gemm}={layer[gemm]!r} must be a BulkOverlapCfg, RingExchangeOverlapCfg or PipelineOverlapCfg."
        ]
    problems = []
    method = value.get("method")
    allowed = (
        ("ring_exchange",) if gemm in GATHERS else ("ring_exchange", "pipeline") if gemm in SCATTERS else ("bulk",)
    )
    if gemm.endswith("dgrad") and gemm in BESIDE:
        allowed = ("bulk", "ring_exchange", "pipeline")
    if method is not None and method not in allowed:
        problems.append(
            f"{_NAME}.{gemm}: this GEMM does not support method {method!r}. Set one of {', '.join(allowed)}."
        )
    wgrad = gemm.replace("dgrad", "wgrad")
    if gemm in BESIDE and wgrad != gemm and method not in (None, "bulk") and layer.get(wgrad) is not None:
        problems.append(
            f"{_NAME}.{wgrad} must be None when {gemm} uses {method!r}, because their communication can no longer run "
            f"at the same time. Set {wgrad}=None."
        )
    numbers = {name: value[name] for name in ("num_sm", "cga_size", "num_splits") if name in value}
    problems += count_problems(f"{_NAME}.{gemm}", **numbers)
    if value.get("atomic_gemm") and not quantized:
        problems.append(
            f"{_NAME}.{gemm}.atomic_gemm=True requires fp8. Set trainer.plugins.fp8, or set atomic_gemm=False."
        )
    return problems
