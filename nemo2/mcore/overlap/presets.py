# SPDX-License-Identifier: Apache-2.0
"""Userbuffer settings that were tuned for a GPU, model width, layout and batch, and the choice of the preset for a run.

The numbers are those of NeMo 2.0 (``llm.recipes.tp_overlap_configs.userbuffers``), under its names. All presets follow
one pattern, so each row states only its differences. The pattern: bulk exchanges during dgrad and wgrad of qkv and fc1,
ring exchanges for gathers, and ring or pipelined exchanges for reduce-scatters.
"""

import dataclasses
from typing import Any, NamedTuple, Optional, Union

from nemo2.base.errors import ConfigError
from nemo2.base.names import did_you_mean
from nemo2.mcore.overlap.tp_overlap_cfg import (
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
    TPOverlapCfg,
    TransformerLayerTPOverlapCfg,
    userbuffer_settings,
)

_FAMILIES = {"h100": "h100", "h200": "h100", "gh200": "h100", "b200": "b200", "gb200": "b200"}
"""The GPU that each GPU's presets were tuned on, with the same number of multiprocessors and links."""


class Job(NamedTuple):
    """What userbuffers are tuned for. A run may have unknown sizes, which are None."""

    dtype: str
    """"bf16" (any 16-bit dtype) or "fp8"."""
    gpu: Optional[str]
    """"h100", "b200" and so on (`nemo2.base.gpus.model_of`). None: no known GPU."""
    hidden_size: Optional[int]
    tensor_parallel: int
    context_parallel: int
    micro_batch_size: Optional[int]
    seq_length: Optional[int]

    def __str__(self) -> str:
        return (
            f"{self.gpu or 'this machine'}, {'fp8' if self.dtype == 'fp8' else '16 bits'}, hidden size "
            f"{self.hidden_size}, tensor-parallel size {self.tensor_parallel}, micro-batch {self.micro_batch_size}, "
            f"sequence length {self.seq_length}"
        )


class Preset(NamedTuple):
    """The job that a preset was tuned for. ``settings()`` returns the tuned numbers."""

    job: Job
    adapters: bool
    """Tuned for LoRA, whose backward has no weight gradients of the linear layers."""
    bulk: tuple[Optional[int], ...]
    """Multiprocessors for the exchange during qkv_dgrad, qkv_wgrad, fc1_dgrad, fc1_wgrad. None: no exchange there."""
    proj_fprop: TPOverlapCfg
    fc2_fprop: TPOverlapCfg
    gathers: RingExchangeOverlapCfg
    fc1_dgrad: Optional[TPOverlapCfg]
    """Replaces the bulk exchange of fc1_dgrad. None: the bulk exchange."""

    @property
    def name(self) -> str:
        job = self.job
        cp = f"_cp{job.context_parallel}" if job.context_parallel > 1 else ""
        return (
            f"userbuffers_{job.dtype}_{job.gpu}_h{job.hidden_size}_tp{job.tensor_parallel}{cp}"
            f"_mbs{job.micro_batch_size}_seqlen{job.seq_length}{'_lora' if self.adapters else ''}"
        )

    def settings(self) -> TransformerLayerTPOverlapCfg:
        """A new object at every call, so that edits don't affect later calls."""
        copy = dataclasses.replace
        bulk = [None if n is None else BulkOverlapCfg(n, cga_size=2, set_sm_margin=False) for n in self.bulk]
        qkv_dgrad, qkv_wgrad, fc1_dgrad, fc1_wgrad = bulk
        return TransformerLayerTPOverlapCfg(
            qkv_dgrad=qkv_dgrad,
            qkv_wgrad=qkv_wgrad,
            fc1_dgrad=fc1_dgrad if self.fc1_dgrad is None else copy(self.fc1_dgrad),
            fc1_wgrad=fc1_wgrad,
            qkv_fprop=copy(self.gathers),
            proj_dgrad=copy(self.gathers),
            fc1_fprop=copy(self.gathers),
            fc2_dgrad=copy(self.gathers),
            proj_fprop=copy(self.proj_fprop),
            fc2_fprop=copy(self.fc2_fprop),
        )


def preset(name: str) -> TransformerLayerTPOverlapCfg:
    """Return the userbuffer settings of this name as a new object.

    Args:
        name: One of `preset_names`.

    Raises:
        ConfigError: there is no such preset. The message lists the nearest names.
    """
    return _named(name).settings()


def preset_names() -> list[str]:
    """The names of all userbuffer presets, which `preset` and ``tp_comm_overlap_cfg`` accept."""
    return list(PRESETS)


def find_preset(job: Job) -> Optional[Preset]:
    """The preset tuned for this GPU, precision, hidden size, tensor-parallel size, micro-batch and sequence length.
    None: no match.

    Presets for the run's context-parallel size come first. A preset for another context-parallel size is also used,
    because that size changes the length of the exchanged buffers but not the set of GEMMs.
    """
    tuned = job._replace(gpu=_FAMILIES.get(job.gpu or ""))
    matches = [
        one
        for one in PRESETS.values()
        if not one.adapters and one.job._replace(context_parallel=job.context_parallel) == tuned
    ]
    return min(matches, key=lambda one: one.job != tuned, default=None)


def choose_userbuffers(job: Job, requested: Any) -> tuple[Any, str]:
    """The userbuffer settings of a run, and the reason.

    ``requested`` is None or "auto" for the matching preset, "default" for Transformer Engine's own settings, a preset's
    name, or settings. The result is settings, or None for Transformer Engine's own.

    Raises:
        ConfigError: an unknown name, or settings that Transformer Engine would reject.
    """
    if requested is None or requested == "auto":
        match = find_preset(job)
        if match is None:
            return None, f"Transformer Engine's defaults: no preset was tuned for {job}"
        note = ""
        if match.job.context_parallel != job.context_parallel:
            note = f", at context_parallel_size={match.job.context_parallel}"
        return match.settings(), f"preset {match.name}: tuned for {job}{note}"
    if isinstance(requested, str) and requested == "default":
        return None, "Transformer Engine's defaults, as requested"
    if isinstance(requested, str):
        return preset(requested), f"preset {requested}, as requested{_mismatch(_named(requested).job, job)}"
    userbuffer_settings(requested, quantized=job.dtype == "fp8")
    return requested, "as requested"


def _named(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(
            f"MegatronCommOverlapCallback.tp_comm_overlap_cfg={name!r}: there is no preset of this "
            f"name{did_you_mean(name, list(PRESETS))} Set 'auto' for the preset that fits the run, or 'default' for "
            "Transformer Engine's own settings."
        )
    return PRESETS[name]


def _mismatch(chosen: Job, job: Job) -> str:
    pairs = (
        ("hidden size", chosen.hidden_size, job.hidden_size),
        ("tensor-parallel size", chosen.tensor_parallel, job.tensor_parallel),
        ("micro-batch size", chosen.micro_batch_size, job.micro_batch_size),
        ("sequence length", chosen.seq_length, job.seq_length),
    )
    other = [f"{what} {tuned}, but the run has {has}" for what, tuned, has in pairs if has is not None and tuned != has]
    return f" (tuned for {'; '.join(other)})" if other else ""


# ------------------------------------------------------------------------------------------------------------- the rows


def _pipelined(num_sm: int, *, fp8_buf: bool = False) -> PipelineOverlapCfg:
    return PipelineOverlapCfg(num_sm, cga_size=2, num_splits=4, set_sm_margin=True, fp8_buf=fp8_buf)


def _row(
    dtype: str,
    gpu: str,
    sizes: tuple[int, int, int, int, int],
    bulk: tuple[Optional[int], ...],
    proj_fprop: Union[int, TPOverlapCfg, None],
    fc2_fprop: Union[int, TPOverlapCfg, None],
    *,
    gathers: RingExchangeOverlapCfg = RingExchangeOverlapCfg(),  # noqa: B008  # copied before it is handed out
    fc1_dgrad: Optional[TPOverlapCfg] = None,
) -> Preset:
    """``sizes`` are hidden, TP, CP, micro-batch, sequence. A number for an fprop: pipelined on that many
    multiprocessors. None: ring exchange, with the GEMM kept off its multiprocessors."""
    ring = RingExchangeOverlapCfg(set_sm_margin=True)
    fprops = [
        ring if one is None else _pipelined(one) if isinstance(one, int) else one for one in (proj_fprop, fc2_fprop)
    ]
    proj, fc2 = fprops
    return Preset(Job(dtype, gpu, *sizes), fc1_dgrad is not None, bulk, proj, fc2, gathers, fc1_dgrad)


_FP8_RING = RingExchangeOverlapCfg(cga_size=2, set_sm_margin=True, fp8_buf=True)
_FP8_PIPELINED = _pipelined(16, fp8_buf=True)

PRESETS: dict[str, Preset] = {
    row.name: row
    for row in (
        _row("bf16", "h100", (8192, 4, 1, 1, 8192), (4, 24, 2, 4), 24, 16),
        _row("fp8", "h100", (8192, 4, 1, 1, 8192), (4, 24, 2, 4), None, None),
        _row("bf16", "b200", (8192, 2, 1, 1, 8192), (16, 24, 2, 4), 32, 16),
        _row("fp8", "b200", (8192, 2, 1, 1, 8192), (4, 24, 2, 4), None, None),
        _row("bf16", "h100", (16384, 8, 2, 1, 8192), (2, 24, 2, 2), 24, 8),
        _row("fp8", "h100", (16384, 8, 2, 1, 8192), (2, 24, 2, 2), None, None),
        _row("bf16", "b200", (16384, 4, 2, 1, 8192), (8, 24, 2, 2), 32, 8),
        _row("fp8", "b200", (16384, 4, 2, 1, 8192), (8, 32, 2, 8), None, None),
        _row(
            "fp8",
            "h100",
            (8192, 2, 1, 1, 4096),
            (2, None, None, None),
            _FP8_RING,
            _FP8_RING,
            gathers=RingExchangeOverlapCfg(set_sm_margin=True),
            fc1_dgrad=_FP8_PIPELINED,
        ),
        _row(
            "fp8",
            "h100",
            (16384, 4, 1, 1, 2048),
            (2, None, None, None),
            _pipelined(32, fp8_buf=True),
            _FP8_PIPELINED,
            gathers=RingExchangeOverlapCfg(aggregate=True),
            fc1_dgrad=_FP8_PIPELINED,
        ),
        _row("bf16", "h100", (6144, 2, 1, 2, 2048), (8, 16, 4, 16), 16, 24),
        _row(
            "fp8",
            "h100",
            (6144, 2, 1, 2, 2048),
            (8, 16, 4, 16),
            _FP8_PIPELINED,
            _pipelined(24, fp8_buf=True),
        ),
        _row("bf16", "h100", (12288, 4, 1, 1, 2048), (4, 4, 2, 4), 24, None),
        _row("fp8", "h100", (12288, 4, 1, 1, 2048), (4, 4, 2, 4), None, None),
        _row("bf16", "b200", (12288, 4, 1, 1, 2048), (4, 16, 2, 8), None, None),
        _row("fp8", "b200", (12288, 4, 1, 1, 2048), (4, 16, 2, 8), None, None),
        _row("bf16", "b200", (6144, 2, 1, 1, 4096), (8, 32, 2, 8), None, None),
        _row("bf16", "b200", (18432, 8, 1, 1, 4096), (8, 32, 2, 8), None, 24),
        _row("fp8", "b200", (18432, 8, 1, 1, 4096), (8, 32, 2, 8), None, None),
    )
}
