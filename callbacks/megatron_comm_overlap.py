# SPDX-License-Identifier: Apache-2.0
"""Which communication runs beside computation: decided from the layout, in one place.

`decide` is a pure function of the layout, of what the callback was asked for and of what the user set elsewhere; the
callback gathers these facts, and writes the answers where Megatron-Core reads them. The rules are NeMo 2.0's, with two
differences: what the user set explicitly on ``strategy.ddp_config`` is kept, and what cannot take effect is said.
"""

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Optional, Union

import lightning.pytorch as pl

from nemo2.backend.extras import have_te, why_missing
from nemo2.config.capture import configurable
from nemo2.config.explicit import explicit_fields
from nemo2.errors import ConfigError
from nemo2.parallel.layout import Layout

_log = logging.getLogger(__name__)

DEFAULT_BUCKET_SIZE = 128 * 1024 * 1024
"""Elements per bucket of the gradient reduction: large enough to fill the links, small enough to start early."""

MODEL_FIELDS = (
    "tp_comm_overlap",
    "tp_comm_overlap_cfg",
    "tp_comm_bootstrap_backend",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
)
DDP_FIELDS = ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size")
OPTIMIZER_FIELDS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapFacts:
    """What the rules need to know about a run."""

    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: Optional[int]
    """Chunks per pipeline stage; None or 1 where stages are whole."""
    gradient_ranks: int
    """Ranks that reduce gradients together: data parallel times context parallel."""
    sequence_parallel: bool
    distributed_optimizer: bool
    fused_weight_gradients: bool
    """Whether ``gradient_accumulation_fusion`` is on."""
    transformer_engine_missing: Optional[str]
    """Why Transformer Engine cannot be used; None where it can."""


class Decision(NamedTuple):
    """The value a field gets, and why."""

    value: Any
    reason: str


def decide(
    facts: OverlapFacts, asked: Mapping[str, Any], explicit: Mapping[str, tuple[str, Any]] | None = None
) -> dict[str, Decision]:
    """Every field of the callback that gets a value, with the reason.

    ``asked`` are the callback's arguments that are not None. ``explicit`` maps a field to the place where the user set
    it otherwise and the value there (``{"bucket_size": ("strategy.ddp_config.bucket_size", 1)}``): such a value wins
    over the callback's default. A field without a decision is left as it is.

    Raises:
        ConfigError: the callback and another place were both given a value, and they differ; or a combination that
            Megatron-Core cannot run.
    """
    explicit = explicit or {}
    for name, value in asked.items():
        if name in explicit and explicit[name][1] != value:
            place, other = explicit[name]
            raise ConfigError(
                f"{place}={other!r} contradicts MegatronCommOverlapCallback({name}={value!r}): both were set, and they "
                "govern one thing. Remove one of them, or make them agree."
            )
    decided = {name: Decision(value, f"set on {place}") for name, (place, value) in explicit.items()}
    decided |= {name: Decision(value, "asked for") for name, value in asked.items()}
    for rules in (_tensor_parallel, _pipeline, _embedding_gradient, _data_parallel):
        rules(facts, decided)
    return decided


@configurable
class MegatronCommOverlapCallback(pl.Callback):
    """Overlaps tensor-, pipeline- and data-parallel communication with computation, as far as the layout allows.

    In ``setup`` it writes the model config, ``strategy.ddp_config`` and the optimizer config, before any of them is
    used; with tensor-parallel overlap it also starts Transformer Engine's userbuffers when the run starts. It costs
    nothing per step and behaves the same on every rank. None leaves an argument to the rules of :func:`decide`.

    - ``tp_comm_overlap``: needs tensor and sequence parallelism and Transformer Engine; off otherwise, and said once.
      ``tp_comm_overlap_cfg`` holds userbuffer settings per GEMM (a dict, or a dataclass whose None fields are left
      out), ``tp_comm_bootstrap_backend`` how ranks find each other.
    - ``overlap_p2p_comm``, ``batch_p2p_comm``: between pipeline stages; by default overlapped with virtual stages,
      batched without.
    - ``overlap_grad_reduce``, ``overlap_param_gather``, ``align_param_gather``, ``bucket_size`` (elements),
      ``overlap_param_gather_with_optimizer_step``: data parallelism with the distributed optimizer.
    - ``defer_embedding_wgrad_compute``, ``wgrad_deferral_limit``: move the output layer's weight gradient into the
      pipeline's drain; needs several stages and gradient accumulation fusion.

    Raises:
        ConfigError: see :func:`decide`, and where the strategy is not MegatronStrategy.
    """

    def __init__(
        self,
        tp_comm_overlap: Optional[bool] = None,
        tp_comm_overlap_cfg: Optional[Any] = None,
        tp_comm_bootstrap_backend: Optional[Literal["nccl", "mpi", "gloo"]] = None,
        overlap_p2p_comm: Optional[bool] = None,
        batch_p2p_comm: Optional[bool] = None,
        overlap_grad_reduce: Optional[bool] = None,
        overlap_param_gather: Optional[bool] = None,
        overlap_param_gather_with_optimizer_step: Optional[bool] = None,
        align_param_gather: Optional[bool] = None,
        bucket_size: Optional[int] = None,
        defer_embedding_wgrad_compute: Optional[bool] = None,
        wgrad_deferral_limit: Optional[int] = None,
    ):
        self.tp_comm_overlap = tp_comm_overlap
        self.tp_comm_overlap_cfg = tp_comm_overlap_cfg
        self.tp_comm_bootstrap_backend = tp_comm_bootstrap_backend
        self.overlap_p2p_comm = overlap_p2p_comm
        self.batch_p2p_comm = batch_p2p_comm
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.overlap_param_gather_with_optimizer_step = overlap_param_gather_with_optimizer_step
        self.align_param_gather = align_param_gather
        self.bucket_size = bucket_size
        self.defer_embedding_wgrad_compute = defer_embedding_wgrad_compute
        self.wgrad_deferral_limit = wgrad_deferral_limit
        self._decisions: dict[str, Decision] = {}
        self._userbuffers_started = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if not isinstance(getattr(strategy, "layout", None), Layout):
            raise ConfigError(
                "MegatronCommOverlapCallback works with MegatronStrategy only, and trainer.strategy is a "
                f"{type(strategy).__name__}: remove the callback from trainer.callbacks."
            )
        config = getattr(pl_module, "config", None)
        optimizer_config = getattr(getattr(pl_module, "optim", None), "config", None)
        names = {*MODEL_FIELDS, *DDP_FIELDS, *OPTIMIZER_FIELDS}
        asked = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        facts = _facts(trainer, strategy, config, optimizer_config)
        explicit = _explicit(strategy, config, optimizer_config)
        decisions = decide(facts, asked, explicit)
        if trainer.is_global_zero and not self._decisions:
            wanted = {place: (name, value) for name, (place, value) in explicit.items()}
            wanted |= {f"MegatronCommOverlapCallback.{name}": (name, value) for name, value in asked.items()}
            for place, (name, value) in wanted.items():
                used, reason = decisions[name]
                if used != value:
                    _log.warning("%s=%s does not take effect, it is %s: %s.", place, value, used, reason)
        self._decisions = decisions
        for target, fields in (
            (config, MODEL_FIELDS),
            (strategy.ddp_config, DDP_FIELDS),
            (optimizer_config, OPTIMIZER_FIELDS),
        ):
            _write(target, {name: decisions[name].value for name in fields if name in decisions})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_userbuffers(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_userbuffers(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_userbuffers(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_userbuffers(trainer, pl_module)

    def _start_userbuffers(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Allocate the buffers that Transformer Engine's overlapped GEMMs exchange; once per process."""
        wanted = self._decisions.get("tp_comm_overlap")
        if wanted is None or not wanted.value or self._userbuffers_started:
            return
        from transformer_engine.pytorch.module.base import initialize_ub  # pyright: ignore[reportMissingImports]

        config: Any = pl_module.config
        sampler: Any = getattr(trainer.strategy, "data_sampler", None) or getattr(
            getattr(trainer, "datamodule", None), "data_sampler", None
        )
        tokens = sampler.seq_len * sampler.micro_batch_size // config.context_parallel_size
        arguments: dict[str, Any] = {
            "shape": [tokens, config.hidden_size],
            "tp_size": config.tensor_model_parallel_size,
            "ub_cfgs": userbuffer_settings(self.tp_comm_overlap_cfg),
            "bootstrap_backend": self._decisions["tp_comm_bootstrap_backend"].value,
        }
        # Transformer Engine 2.5 replaced the flag by a list with one mode per buffer set.
        if "quantization_modes" in inspect.signature(initialize_ub).parameters:
            from transformer_engine.pytorch.module.base import (  # pyright: ignore[reportMissingImports]
                UserBufferQuantizationMode,
            )

            mode = UserBufferQuantizationMode.FP8 if config.fp8 is not None else UserBufferQuantizationMode.NONE
            arguments["quantization_modes"] = [mode]
        else:
            arguments["use_fp8"] = config.fp8 is not None
        initialize_ub(**arguments)
        self._userbuffers_started = True


def userbuffer_settings(settings: Any) -> Optional[dict[str, Any]]:
    """Userbuffer settings as Transformer Engine takes them: a dict of GEMM name to settings, nothing that is None."""
    if settings is None:
        return None
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = dataclasses.asdict(settings)
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"MegatronCommOverlapCallback.tp_comm_overlap_cfg={settings!r} must be a dict of GEMM names "
            "(such as qkv_fprop) to settings, or a dataclass of them."
        )
    return {name: value for name, value in settings.items() if value is not None}


Decisions = dict[str, Decision]


def _tensor_parallel(facts: OverlapFacts, decided: Decisions) -> None:
    if facts.tensor_parallel < 2:
        obstacle = f"tensor_model_parallel_size is {facts.tensor_parallel}"
    elif not facts.sequence_parallel:
        obstacle = "sequence_parallel is off"
    else:
        obstacle = facts.transformer_engine_missing
    if obstacle is not None:
        _turn_off(decided, "tp_comm_overlap", obstacle)
    decided.setdefault("tp_comm_overlap", Decision(False, "not asked for"))
    if decided["tp_comm_overlap"].value:
        # MPI needs a launcher that started it; NCCL is there whenever the run is.
        decided.setdefault("tp_comm_bootstrap_backend", Decision("nccl", "works under every launcher"))


def _pipeline(facts: OverlapFacts, decided: Decisions) -> None:
    stages, chunks = facts.pipeline_parallel, facts.virtual_pipeline or 1
    if stages == 1:
        for name in ("overlap_p2p_comm", "batch_p2p_comm"):
            _turn_off(decided, name, "pipeline_model_parallel_size is 1")
            decided.setdefault(name, Decision(False, "pipeline_model_parallel_size is 1"))
        return
    overlap = decided.setdefault(
        "overlap_p2p_comm",
        Decision(True, "virtual pipeline stages leave computation to overlap with")
        if chunks > 1
        else Decision(False, "without virtual pipeline stages there is nothing to overlap with"),
    ).value
    if overlap and chunks == 1:
        raise ConfigError(
            f"overlap_p2p_comm=True needs virtual pipeline stages, and pipeline_model_parallel_size={stages} has none: "
            "set strategy.virtual_pipeline_model_parallel_size, or leave overlap_p2p_comm unset."
        )
    batch = decided.setdefault(
        "batch_p2p_comm", Decision(not overlap, "sends and receives are either overlapped or batched")
    ).value
    if overlap and batch:
        raise ConfigError(
            "overlap_p2p_comm=True and batch_p2p_comm=True exclude each other: batched sends and receives cannot be "
            "waited for one by one. Leave batch_p2p_comm unset."
        )


def _embedding_gradient(facts: OverlapFacts, decided: Decisions) -> None:
    if facts.pipeline_parallel == 1:
        _turn_off(decided, "defer_embedding_wgrad_compute", "pipeline_model_parallel_size is 1")
    elif not facts.fused_weight_gradients:
        _turn_off(decided, "defer_embedding_wgrad_compute", "model.config.gradient_accumulation_fusion is off")


def _data_parallel(facts: OverlapFacts, decided: Decisions) -> None:
    alone = facts.gradient_ranks == 1
    if not facts.distributed_optimizer:
        for name in ("overlap_param_gather", "align_param_gather", "overlap_param_gather_with_optimizer_step"):
            _turn_off(decided, name, "optim.config.use_distributed_optimizer is off")
        return
    why = "one rank reduces alone" if alone else f"{facts.gradient_ranks} ranks reduce gradients together"
    decided.setdefault("overlap_grad_reduce", Decision(not alone, why))
    if not decided["overlap_grad_reduce"].value:
        # Megatron-Core starts gathering parameters from the hooks that overlapped reduction installs.
        _turn_off(decided, "overlap_param_gather", "overlap_grad_reduce is off")
    gather = decided.setdefault(
        "overlap_param_gather", Decision(decided["overlap_grad_reduce"].value and not alone, why)
    ).value
    staged = facts.pipeline_parallel > 1 and (facts.virtual_pipeline or 1) > 1
    if not gather:
        for name in ("align_param_gather", "overlap_param_gather_with_optimizer_step"):
            _turn_off(decided, name, "overlap_param_gather is off")
    decided.setdefault(
        "align_param_gather",
        Decision(bool(gather and staged), "all stages gather at one time" if gather and staged else "nothing to align"),
    )
    decided.setdefault("overlap_param_gather_with_optimizer_step", Decision(False, "not asked for"))
    if not alone:
        decided.setdefault("bucket_size", Decision(DEFAULT_BUCKET_SIZE, why))


def _turn_off(decided: Decisions, name: str, obstacle: str) -> None:
    if name in decided and decided[name].value:
        decided[name] = Decision(False, obstacle)


def _facts(trainer: pl.Trainer, strategy: Any, config: Any, optimizer_config: Any) -> OverlapFacts:
    layout: Layout = strategy.layout
    return OverlapFacts(
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        virtual_pipeline=layout.vp,
        gradient_ranks=trainer.world_size // (layout.tp * layout.pp),
        sequence_parallel=layout.sp,
        distributed_optimizer=bool(getattr(optimizer_config, "use_distributed_optimizer", False)),
        fused_weight_gradients=bool(getattr(config, "gradient_accumulation_fusion", False)),
        transformer_engine_missing=None if have_te() else why_missing("transformer_engine"),
    )


def _explicit(strategy: Any, config: Any, optimizer_config: Any) -> dict[str, tuple[str, Any]]:
    """What the user set on the configs that the callback writes, as opposed to their defaults."""
    found: dict[str, tuple[str, Any]] = {}
    for place, target, names, fields in (
        ("optim.config", optimizer_config, explicit_fields(optimizer_config), OPTIMIZER_FIELDS),
        ("model.config", config, explicit_fields(config), MODEL_FIELDS),
        ("strategy.ddp_config", strategy.ddp_config, strategy.explicit_ddp_fields, DDP_FIELDS),
    ):
        found |= {name: (f"{place}.{name}", getattr(target, name)) for name in fields if name in names}
    return found


def _write(target: Union[Any, None], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if target is not None and hasattr(target, name):
            setattr(target, name, value)
