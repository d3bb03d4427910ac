# SPDX-License-Identifier: Apache-2.0
"""Which communication overlaps: the rows by which it follows from a run's layout and from its user's settings.

The defaults are NeMo 2.0's, with three differences. A value that the user set wins wherever it was set. Two values that
contradict each other are an error that names both. Overlap that the layout can't use is off, with a reason.

| communication | on by default where | needs |
|---|---|---|
| tensor parallel (``tp_comm_overlap``) | never | TP ≥ 2, sequence parallelism, Transformer Engine |
| pipeline (``overlap_p2p_comm``) | virtual stages | PP ≥ 2 with virtual stages |
| pipeline, batched (``batch_p2p_comm``) | PP ≥ 2 without overlap | PP ≥ 2 |
| gradients (``overlap_grad_reduce``) | distributed optimizer and more than one rank to reduce with | – |
| parameters (``overlap_param_gather``) | as gradients | the distributed optimizer, overlapped gradients |

The overlap callback applies the rows before a run. `nemo2.mcore.settle.settle` applies them on copies.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Optional

from nemo2.base.errors import ConfigError
from nemo2.config.derivations import Condition, Conflict, Derivation, Row, Setting, Text, always, apply
from nemo2.config.provenance import adjust, is_same
from nemo2.config.requested import explicit_values, where_set
from nemo2.mcore.overlap.tp_switches import SWITCHES, contradictions, left_out, switches_of, unswitchable
from nemo2.mcore.overlap.userbuffer_limits import without_buffers
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle.machine import Machine
from nemo2.mcore.settle.rows import BETWEEN_STAGES, GATHER_AHEAD, ONE_BUCKET
from nemo2.mcore.settle.run_settings import DDP, MODEL, OPTIM, OVERLAP_RULE, STRATEGY, RunSettings

CALLBACK = "MegatronCommOverlapCallback"
DEFAULT_BUCKET_SIZE = 128 * 1024 * 1024
"""Elements per bucket of the gradient reduction: large enough to fill the links, small enough to start early."""

FIELDS = {
    DDP: ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size"),
    OPTIM: ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
    MODEL: (
        "tp_comm_overlap",
        "tp_comm_overlap_cfg",
        "tp_comm_bootstrap_backend",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
    ),
}
"""The callback's arguments by the configurations that have a field of the name."""
_ARGUMENTS = tuple(dict.fromkeys(name for names in FIELDS.values() for name in names))
_OTHER_FIELDS = ("num_buckets", "use_distributed_optimizer", *SWITCHES)
"""Fields of the configurations that are no arguments of the callback, but contradict or decide some."""


class Decision(NamedTuple):
    """The value of a field, and the reason. ``by_user`` tells whether the value is the user's rather than a default."""

    value: Any
    reason: str
    by_user: bool = False


def overlap(
    run: RunSettings,
    callbacks: Sequence[Any],
    *,
    world_size: int,
    data_sampler: Any,
    say: Optional[Callable[..., None]] = None,
) -> dict[str, Decision]:
    """Decide which communication overlaps, write the decisions into the configurations of ``run``, and return them by
    the fields' names. A field without a decision keeps its value.

    Args:
        run: The settled configurations of a run, on the machine that trains.
        callbacks: Overlap callbacks. Several count as one.
        world_size: The run's ranks.
        data_sampler: The source of the sequence length and the micro-batch size. None: unknown.
        say: A logger's method, called for settings that have no effect.

    Raises:
        ConfigError: settings contradict each other. The message lists all contradictions, with both settings and their
            lines.
    """
    view = _OverlapSettings(run, callbacks, world_size, data_sampler)
    apply((*view.clashes(), *CONFLICTS, *DECISIONS), view)
    decisions = view.decisions
    if say is not None:
        for setting, used in view.ineffective():
            say("%s does not take effect. The run uses %s: %s.", setting.place, used.value, used.reason)
        if decisions["tp_comm_overlap"].value:
            for sentence in left_out(decisions["tp_comm_overlap_cfg"].value):
                say("%s", sentence)
    for path, names in FIELDS.items():
        config = run.configs[path]
        for name in (*names, *SWITCHES):
            if name in decisions and hasattr(config, name):
                adjust(config, name, decisions[name].value, why=f"{CALLBACK}: {decisions[name].reason}")
    return decisions


def arguments_of(callback: Any) -> list[Setting]:
    """The user's arguments of an overlap callback."""
    return list(_explicit(callback, CALLBACK, _ARGUMENTS))


def _explicit(target: Any, owner: str, names: Iterable[str]) -> Iterator[Setting]:
    """The fields that the user set. None is not a setting: Megatron-Core decides such a field."""
    values = explicit_values(target)
    for name in names:
        if values.get(name) is not None:
            yield Setting(name, owner, values[name], where_set(target, name))


@dataclasses.dataclass(frozen=True)
class _OverlapSettings:
    """A run's settings with those of its overlap callbacks, as the rows below read them.

    A setting counts wherever it was set, so that only the names of fields matter.
    """

    run: RunSettings
    callbacks: Sequence[Any]
    world_size: int
    data_sampler: Any

    @cached_property
    def settings(self) -> list[Setting]:
        """The user's settings: the callbacks' arguments first."""
        settings = [setting for callback in self.callbacks for setting in arguments_of(callback)]
        for path, names in FIELDS.items():
            settings += _explicit(self.run.configs[path], path, (*names, *_OTHER_FIELDS))
        return settings

    @cached_property
    def decisions(self) -> dict[str, Decision]:
        decisions: dict[str, Decision] = {}
        for setting in self.settings:
            decisions.setdefault(setting.name, Decision(setting.value, f"set: {setting}", by_user=True))
        return decisions

    def __getitem__(self, field: str) -> Any:
        """The decided value. None: nothing is decided. Fields without decisions have the run's values."""
        name = field.rpartition(".")[2]
        if name in _ARGUMENTS or name in SWITCHES:
            return self.decisions[name].value if name in self.decisions else None
        return self.run[field]

    def requested(self, field: str) -> Optional[Setting]:
        return next((setting for setting in self.settings if setting.name == field.rpartition(".")[2]), None)

    def in_force(self, field: str) -> Setting:
        return self.requested(field) or self.run.in_force(field)

    def adjust(self, field: str, value: Any, why: str) -> None:
        self.decisions[field.rpartition(".")[2]] = Decision(value, why)

    def clashes(self) -> Iterator[Conflict]:
        """A conflict for each two settings of one field that differ."""
        for setting in self.settings:
            first = self.in_force(setting.name)
            if not is_same(_plain(first.value), _plain(setting.value)):
                fix = "Remove one of them, or set both to the same value."
                yield Conflict(OVERLAP_RULE, (first, setting), "both control the same setting", fix)

    def ineffective(self) -> Iterator[tuple[Setting, Decision]]:
        """The settings that have no effect, each once, with the decision that replaces it."""
        for name in dict.fromkeys(setting.name for setting in self.settings):
            setting, decision = self.in_force(name), self.decisions[name]
            chosen = name == "tp_comm_overlap_cfg" and self[_TENSORS]  # by the user's name, or as the user's settings
            if not (decision.by_user or chosen or decision.value == setting.value or setting.value == "auto"):
                yield setting, decision

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def machine(self) -> Machine:
        return self.run.machine

    @property
    def gradient_ranks(self) -> int:
        """Ranks that reduce gradients together: data parallel times context parallel."""
        return max(1, self.world_size // (self.layout.tp * self.layout.pp))

    @property
    def sharded(self) -> bool:
        """Whether the optimizer state is sharded over the ranks that reduce gradients together."""
        return bool(self.run[_SHARDED])


def _plain(value: Any) -> Any:
    """Userbuffer settings as a dict, which a user may write as well."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


_TP, _PP = f"{STRATEGY}.tensor_model_parallel_size", f"{STRATEGY}.pipeline_model_parallel_size"
_TENSORS, _BUFFERS = f"{MODEL}.tp_comm_overlap", f"{MODEL}.tp_comm_overlap_cfg"
_BOOTSTRAP = f"{MODEL}.tp_comm_bootstrap_backend"
_MESSAGES, _BATCHED = f"{MODEL}.overlap_p2p_comm", f"{MODEL}.batch_p2p_comm"
_DEFERRED, _LIMIT = f"{MODEL}.defer_embedding_wgrad_compute", f"{MODEL}.wgrad_deferral_limit"
_REDUCED, _GATHERED = f"{DDP}.overlap_grad_reduce", f"{DDP}.overlap_param_gather"
_ALIGNED, _IN_STEP = f"{DDP}.align_param_gather", f"{OPTIM}.overlap_param_gather_with_optimizer_step"
_BUCKET, _BUCKETS = f"{DDP}.bucket_size", f"{DDP}.num_buckets"
_SHARDED = f"{OPTIM}.use_distributed_optimizer"


# ------------------------------------------------------------------------------------------- what excludes each other


def _pair(first: tuple[str, Any], second: tuple[str, Any], why: str) -> Conflict:
    return Conflict(OVERLAP_RULE, (first, second), why, "Remove one of them.")


def _by_megatron_fsdp(run: _OverlapSettings) -> tuple[tuple[str, ...], Optional[str]]:
    """The fields of the gradient buffers that Megatron-FSDP switches on itself, and why it may not overlap the reduction
    of gradients. None: it may, or there is no Megatron-FSDP."""
    if not run[f"{DDP}.use_megatron_fsdp"]:
        return (), None
    from nemo2.mcore.parallel.fsdp import always_overlapped, not_overlapped

    sharding = run[f"{DDP}.data_parallel_sharding_strategy"]
    return always_overlapped(sharding), not_overlapped(sharding)


_ONLY_SHARDED = "only the distributed optimizer has parameters to gather"

CONFLICTS = (
    GATHER_AHEAD,
    _pair((_GATHERED, True), (_SHARDED, False), _ONLY_SHARDED),
    _pair((_ALIGNED, True), (_GATHERED, False), "there is no overlapped gather to align"),
    _pair((_IN_STEP, True), (_GATHERED, False), "there is no overlapped gather to combine with the optimizer step"),
    _pair((_IN_STEP, True), (_SHARDED, False), _ONLY_SHARDED),
    *BETWEEN_STAGES,
    *(
        Conflict(
            OVERLAP_RULE,
            ((f"{DDP}.{name}", False),),
            "strategy.fsdp='megatron' always overlaps this communication",
            f"Remove {name}.",
            lambda run, name=name: name in _by_megatron_fsdp(run)[0],
        )
        for name in ("overlap_grad_reduce", "overlap_param_gather")
    ),
    Conflict(OVERLAP_RULE, ((_REDUCED, True),), lambda run: _by_megatron_fsdp(run)[1], "Remove overlap_grad_reduce."),
    Conflict(
        OVERLAP_RULE,
        (_BUCKET, _BUCKETS),
        "each of them determines the other",
        "Remove one of them.",
        lambda run: run.requested(_BUCKET) is not None and run.requested(_BUCKETS) is not None,
    ),
)


# ---------------------------------------------------------------------------------------------------------- decisions


def _default(field: str, value: Any, why: Text, when: Condition = always) -> Derivation:
    """The value where nothing has been decided."""
    name = field.rpartition(".")[2]
    return Derivation(field, field, value, why, lambda run: name not in run.decisions and when(run))


def _off(field: str, why: Text, when: Condition = always, *, value: Any = False) -> Derivation:
    """Turn off what the user set and the run can't use. ``value`` is Megatron-Core's default for a detail."""
    return Derivation(field, field, value, why, lambda run: bool(run[field]) and when(run))


def _never(field: str, why: Text, when: Condition = always) -> Derivation:
    """Off, whether or not the user set it."""
    return Derivation(field, field, False, why, when)


def _without_tensors(run: _OverlapSettings) -> Optional[str]:
    """Why tensor-parallel communication can't overlap. None: it can."""
    if run.layout.tp < 2:
        return f"tensor_model_parallel_size is {run.layout.tp}"
    if not run.layout.sp:
        return "sequence_parallel is off"
    return run.machine.te_missing or without_buffers(run.run.model_config)


def _userbuffers(run: _OverlapSettings) -> tuple[Any, str]:
    """The userbuffer settings of a run, and the reason. They must be ones that the switches can produce."""
    from nemo2.mcore.overlap.presets import Job, choose_userbuffers

    job = Job(
        "bf16" if run[f"{MODEL}.fp8"] is None else "fp8",
        run.machine.model,
        run[f"{MODEL}.hidden_size"],
        run.layout.tp,
        run.layout.cp,
        getattr(run.data_sampler, "micro_batch_size", None),
        getattr(run.data_sampler, "seq_len", None),
    )
    requested = run.requested(_BUFFERS)
    settings, reason = choose_userbuffers(job, None if requested is None else requested.value)
    set_by_hand = {name: run.decisions[name].value for name in SWITCHES if name in run.decisions}
    # An explicit switch may turn an overlap off, but not on.
    if problems := [*unswitchable(settings), *contradictions(settings, set_by_hand)]:
        raise ConfigError("\n".join(problems))
    return settings, reason


def _switch(name: str) -> Derivation:
    return _default(
        f"{MODEL}.{name}",
        lambda run: switches_of(run[_BUFFERS])[name],
        f"follows from tp_comm_overlap_cfg for {', '.join(SWITCHES[name])}",
        lambda run: run[_TENSORS],
    )


def _unfused(run: _OverlapSettings) -> bool:
    return not (run[f"{MODEL}.gradient_accumulation_fusion"] and run.machine.output_layer_can_fuse)


def _alone(run: _OverlapSettings) -> bool:
    return run.sharded and run.gradient_ranks == 1


def _together(run: _OverlapSettings) -> str:
    return f"{run.gradient_ranks} ranks reduce gradients together"


def _without_gather(run: _OverlapSettings) -> Optional[str]:
    """Why no parameters can be gathered in the forward. None: they can."""
    if not run.sharded:
        return "optim.config.use_distributed_optimizer is off"
    if run.gradient_ranks == 1:
        return "a single rank holds all parameters"
    # Without it Megatron-Core makes a single bucket, and the first layer waits for all of it.
    return None if run[_REDUCED] else "overlap_grad_reduce is off"


_ONE_STAGE = "pipeline_model_parallel_size is 1"

DECISIONS: tuple[Row, ...] = (
    # tensor parallel
    _off(_TENSORS, _without_tensors),
    _default(_TENSORS, False, "not requested"),
    _off(
        _BUFFERS,
        "tp_comm_overlap is off",
        lambda run: not run[_TENSORS] and run[_BUFFERS] not in ("auto", "default"),
        value=None,
    ),
    # MPI needs its own launcher, whereas NCCL is available in every run.
    _default(_BOOTSTRAP, "nccl", "works under every launcher", lambda run: run[_TENSORS]),
    Derivation(
        _BUFFERS,
        _TENSORS,
        lambda run: _userbuffers(run)[0],
        lambda run: _userbuffers(run)[1],
        lambda run: run[_TENSORS],
    ),
    *map(_switch, SWITCHES),
    # pipeline
    _never(_MESSAGES, _ONE_STAGE, lambda run: run.layout.pp == 1),
    _never(_BATCHED, _ONE_STAGE, lambda run: run.layout.pp == 1),
    _default(_MESSAGES, False, "batch_p2p_comm is on", lambda run: run[_BATCHED]),
    _default(
        _MESSAGES, True, "virtual pipeline stages leave computation to overlap with", lambda run: run.layout.interleaved
    ),
    _default(_MESSAGES, False, "without virtual pipeline stages there is nothing to overlap with"),
    _default(_BATCHED, lambda run: not run[_MESSAGES], "sends and receives are either overlapped or batched"),
    # the embedding's gradient
    _off(_DEFERRED, _ONE_STAGE, lambda run: run.layout.pp == 1),
    _off(
        _DEFERRED, "the output layer does not fuse its weight gradient (gradient_accumulation_fusion, Apex)", _unfused
    ),
    _off(_LIMIT, "defer_embedding_wgrad_compute is off", lambda run: not run[_DEFERRED], value=0),
    # gradients. NeMo's callback doesn't change the buffers of a run without the distributed optimizer either.
    _never(_REDUCED, "a single rank has no gradients to reduce", _alone),
    _default(_REDUCED, False, lambda run: _by_megatron_fsdp(run)[1], lambda run: run.sharded),
    _default(_REDUCED, True, _together, lambda run: run.sharded),
    _off(_BUCKET, ONE_BUCKET, lambda run: not run[_REDUCED], value=None),
    _default(
        _BUCKET,
        DEFAULT_BUCKET_SIZE,
        _together,
        lambda run: run.sharded and not _alone(run) and run.requested(_BUCKETS) is None,
    ),
    # parameters
    _default(
        _GATHERED,
        True,
        lambda run: f"{run.gradient_ranks} ranks hold shards of the parameters",
        lambda run: _without_gather(run) is None,
    ),
    _never(_GATHERED, _without_gather),
    *(
        row
        for field in (_ALIGNED, _IN_STEP)
        for row in (
            _never(field, "there are no virtual pipeline stages", lambda run: not run.layout.interleaved),
            _never(field, "overlap_param_gather is off", lambda run: not run[_GATHERED]),
            _never(field, _without_gather),
        )
    ),
    _default(_ALIGNED, True, "all stages gather at the same time"),
    _default(_IN_STEP, False, "not requested"),
)
