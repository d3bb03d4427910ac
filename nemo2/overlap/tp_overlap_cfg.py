# SPDX-License-Identifier: Apache-2.0
"""Userbuffer settings: how each GEMM of a transformer layer overlaps its tensor-parallel communication.

Names and fields are NeMo 2.0's. A layer has four linear modules (qkv, proj, fc1, fc2), each with a forward product and two
in the backward pass: for the input (dgrad) and for the weight (wgrad). Which methods a GEMM can take is Transformer
Engine's rule (``initialize_ub`` in transformer_engine/pytorch/module/base.py):

- *bulk*: the whole exchange runs beside a GEMM that doesn't need it. For dgrad and wgrad of qkv and fc1.
- *ring exchange*: the GEMM is split by rank, and chunks travel round the ring. For gathers and reduce-scatters.
- *pipeline*: the GEMM is split into ``num_splits``, each followed by its reduce-scatter. For reduce-scatters only.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, Optional, TypeVar, Union

from nemo2.config.capture import configurable
from nemo2.errors import ConfigError
from nemo2.names import did_you_mean

GATHERS = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
"""GEMMs that wait for an all-gather of their input."""
SCATTERS = ("proj_fprop", "fc2_fprop")
"""GEMMs whose output is reduce-scattered."""
BESIDE = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
"""GEMMs beside which another one's exchange can run; of these the dgrads can also be reduce-scattered themselves."""


@dataclasses.dataclass
class TPOverlapCfg:
    """Base class of the three overlap methods."""


@configurable
@dataclasses.dataclass
class BulkOverlapCfg(TPOverlapCfg):
    """The exchange as a whole, beside a GEMM that doesn't need it.

    ``num_sm`` streaming multiprocessors do the exchange, in clusters of ``cga_size``; ``set_sm_margin`` keeps the GEMM off
    them.
    """

    num_sm: int
    cga_size: int
    set_sm_margin: bool
    method: Literal["bulk"] = "bulk"


@configurable
@dataclasses.dataclass
class RingExchangeOverlapCfg(TPOverlapCfg):
    """Chunks of the GEMM, one per rank, while their inputs or outputs travel round the ring.

    ``aggregate`` works on two chunks at a time; ``fp8_buf`` exchanges in fp8; ``atomic_gemm`` (fp8 only) is one kernel
    that waits for chunks itself.
    """

    aggregate: bool = False
    method: Literal["ring_exchange"] = "ring_exchange"
    num_sm: int = 1
    cga_size: int = 1
    set_sm_margin: bool = False
    fp8_buf: bool = False
    atomic_gemm: bool = False


@configurable
@dataclasses.dataclass
class PipelineOverlapCfg(TPOverlapCfg):
    """``num_splits`` parts of the GEMM, each reduce-scattered while the next is computed."""

    num_sm: int
    cga_size: int
    num_splits: int
    set_sm_margin: bool
    # NeMo's default is a tuple by typing error, which counts as true; False is what was meant.
    fp8_buf: bool = False
    atomic_gemm: bool = False
    method: Literal["pipeline"] = "pipeline"


_Settings = Optional[Union[TPOverlapCfg, dict[str, Any]]]


_Class = TypeVar("_Class", bound=type)


def _judged(of: _Class) -> _Class:
    """Judge each object when it is made, but not in ``__post_init__``: `fiddle.experimental.dataclasses`, with which NeMo's
    scripts make configs of these settings, refuses a class that has the method."""
    make = of.__init__

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        userbuffer_settings(self)

    of.__init__ = made
    return of


@configurable
@_judged
@dataclasses.dataclass
class TransformerLayerTPOverlapCfg:
    """Settings per GEMM. None: its exchange isn't overlapped (`nemo2.overlap.tp_switches` says what can be off alone).

    Raises:
        ConfigError: a method that a GEMM can't take, sizes that are no positive numbers; all of them at once.
    """

    qkv_dgrad: _Settings = None
    qkv_wgrad: _Settings = None
    fc1_dgrad: _Settings = None
    fc1_wgrad: _Settings = None
    qkv_fprop: _Settings = None
    proj_dgrad: _Settings = None
    fc1_fprop: _Settings = None
    fc2_dgrad: _Settings = None
    proj_fprop: _Settings = None
    fc2_fprop: _Settings = None


def userbuffer_settings(settings: Any, *, quantized: bool = True) -> Optional[dict[str, Any]]:
    """Settings as Transformer Engine takes them: ``{"qkv_fprop": {"method": ..., "num_sm": ...}}`` without what is None.

    Args:
        settings: A `TransformerLayerTPOverlapCfg`, a mapping of GEMMs to settings, or None for none.
        quantized: Whether GEMMs run in fp8; without, ``atomic_gemm`` is refused.

    Raises:
        ConfigError: an unknown GEMM, or settings Transformer Engine would refuse at start-up, all of them at once.
    """
    if settings is None:
        return None
    given = _fields(settings)
    if given is None:
        raise ConfigError(
            f"{_NAME}={settings!r} must be a TransformerLayerTPOverlapCfg, the name of a preset, or a dict of GEMM names "
            "(such as qkv_fprop) to settings."
        )
    plain = {gemm: _fields(value) for gemm, value in given.items() if value is not None}
    problems = [problem for gemm, value in plain.items() for problem in _problems(gemm, value, plain, quantized)]
    if problems:
        raise ConfigError("\n".join(problems))
    return plain


def settings_per_mode(settings: Optional[dict[str, Any]], modes: int) -> Any:
    """`userbuffer_settings` for ``modes`` sets of buffers, the second of which is of layers in 16 bits.

    ``initialize_ub`` moves a dgrad that isn't in bulk from one of its lists to another when it reads the method, and fails
    where a second set says the method again.

    Raises:
        ConfigError: ``atomic_gemm``, which is for 8 bits, and whose pairs are one list for all sets.
    """
    if settings is None or modes == 1:
        return settings
    for gemm, entry in settings.items():
        if entry.get("atomic_gemm"):
            raise ConfigError(
                f"{_NAME}.{gemm}.atomic_gemm=True with trainer.plugins.first_last_layers_bf16=True: layers in 16 bits can't have "
                "it, and Transformer Engine knows no difference between layers. Set one of the two to False."
            )
    second = {gemm: dict(entry) for gemm, entry in settings.items()}
    for gemm in ("qkv_dgrad", "fc1_dgrad"):
        if second.get(gemm, {}).get("method", "bulk") != "bulk":
            del second[gemm]["method"]
    return [settings, second]


def given_settings(settings: Any) -> dict[str, Optional[dict[str, Any]]]:
    """Settings by GEMM, None for those that are off; what a dict leaves out, and everything of None, is Transformer Engine's."""
    given = {} if settings is None else _fields(settings) or {}
    return {gemm: None if value is None else _fields(value) or {} for gemm, value in given.items()}


_NAME = "MegatronCommOverlapCallback.tp_comm_overlap_cfg"


def _fields(settings: Any) -> Optional[dict[str, Any]]:
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return dict(settings) if isinstance(settings, Mapping) else None


def _problems(gemm: str, value: Optional[dict[str, Any]], layer: Mapping[str, Any], quantized: bool) -> list[str]:
    known = (*GATHERS, *SCATTERS, *BESIDE)
    if gemm not in known:
        return [f"{_NAME}.{gemm}: Transformer Engine has no such GEMM{did_you_mean(gemm, known)}"]
    if value is None:
        return [
            f"{_NAME}.{gemm}={layer[gemm]!r} must be a BulkOverlapCfg, RingExchangeOverlapCfg or PipelineOverlapCfg."
        ]
    found = []
    method = value.get("method")
    allowed = (
        ("ring_exchange",) if gemm in GATHERS else ("ring_exchange", "pipeline") if gemm in SCATTERS else ("bulk",)
    )
    if gemm.endswith("dgrad") and gemm in BESIDE:
        allowed = ("bulk", "ring_exchange", "pipeline")
    if method is not None and method not in allowed:
        found.append(f"{_NAME}.{gemm}: method {method!r} is not one that this GEMM can take: {', '.join(allowed)}.")
    wgrad = gemm.replace("dgrad", "wgrad")
    if gemm in BESIDE and wgrad != gemm and method not in (None, "bulk") and layer.get(wgrad) is not None:
        found.append(
            f"{_NAME}.{wgrad} must be None where {gemm} uses {method!r}: its exchange no longer runs beside the other."
        )
    for name in ("num_sm", "cga_size", "num_splits"):
        number = value.get(name, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            found.append(f"{_NAME}.{gemm}.{name}={number!r} must be a positive whole number.")
    if value.get("atomic_gemm") and not quantized:
        found.append(f"{_NAME}.{gemm}.atomic_gemm=True works in fp8 only: set trainer.plugins.fp8, or leave it False.")
    return found
