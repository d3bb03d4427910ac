# SPDX-License-Identifier: Apache-2.0
"""Decides which communication overlaps, from the layout and the user's settings.

The defaults are NeMo 2.0's, with three differences. A value that the user set wins wherever it was set. Two values that
contradict each other are an error that names both. Overlap that the layout can't use is off, with a reason.

| communication | on by default where | needs |
|---|---|---|
| tensor parallel (``tp_comm_overlap``) | never | TP ≥ 2, sequence parallelism, Transformer Engine |
| pipeline (``overlap_p2p_comm``) | virtual stages | PP ≥ 2 with virtual stages |
| pipeline, batched (``batch_p2p_comm``) | PP ≥ 2 without overlap | PP ≥ 2 |
| gradients (``overlap_grad_reduce``) | distributed optimizer and more than one rank to reduce with | – |
| parameters (``overlap_param_gather``) | as gradients | the distributed optimizer, overlapped gradients |
| context parallel | CP ≥ 2: the ring exchanges the next block while it attends over this one | a ring (``cp_comm_type``) |
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

from nemo2.config.derivations import Conflict, Setting
from nemo2.errors import ConfigError
from nemo2.mcore.overlap.settings import Decision, OverlapFacts
from nemo2.mcore.overlap.tp_switches import SWITCHES, switches_of, unswitchable
from nemo2.mcore.overlap.tp_switches import contradictions as switch_contradictions
from nemo2.mcore.parallel.layout import Layout

DEFAULT_BUCKET_SIZE = 128 * 1024 * 1024
"""Elements per bucket of the gradient reduction: large enough to fill the links, small enough to start early."""

ONE_BUCKET = "overlap_grad_reduce is off, so Megatron-Core puts all gradients into one bucket"


def decide(facts: OverlapFacts, requested: Iterable[Setting] = ()) -> dict[str, Decision]:
    """Decide every field of the callback that gets a value, with the reason. A field without a decision keeps its
    value.

    ``cp_comm_overlap`` is included for completeness, although no setting controls it.

    Args:
        facts: The facts of the run.
        requested: The user's settings, which the decisions keep.

    Raises:
        ConfigError: settings contradict each other. The message lists all contradictions, with both settings and their
            lines.
    """
    requested = list(requested)
    refuse_conflicts(facts, requested)
    decided: Decisions = {}
    for setting in requested:
        decided.setdefault(setting.name, Decision(setting.value, f"set: {setting}", by_user=True))
    for rules in (_tensor_parallel, _pipeline, _embedding_gradient, _gradients, _parameters, _context_parallel):
        rules(facts, decided)
    return decided


def ineffective(decided: dict[str, Decision], requested: Iterable[Setting]) -> list[tuple[Setting, Decision]]:
    """The settings that have no effect, each once, with the decision that replaces it. "auto" always has its effect."""
    overruled = {}
    for setting in requested:
        decision = decided[setting.name]
        if not decision.by_user and decision.value != setting.value and setting.value != "auto":
            overruled.setdefault(setting.name, (setting, decision))
    return list(overruled.values())


# ------------------------------------------------------------------------------------------- what excludes each other

RULE = "overlap-is-asked-for-once"
_MODEL = "model.config"


def _pair(first: tuple[str, Any], second: tuple[str, Any], why: str) -> Conflict:
    return Conflict(RULE, (first, second), why, "Remove one of them.")


_ONLY_SHARDED = "only the distributed optimizer has parameters to gather"

GATHER_AHEAD = Conflict(
    "gather-starts-from-reduction",
    (("overlap_param_gather", True), ("overlap_grad_reduce", False)),
    "without overlapped reduction there is only one bucket, so no bucket can be gathered ahead",
    "Set overlap_grad_reduce=True, or overlap_param_gather=False.",
)
"""For every run, once the callback has decided."""

PAIRS = (
    GATHER_AHEAD,
    _pair(("overlap_param_gather", True), ("use_distributed_optimizer", False), _ONLY_SHARDED),
    _pair(("align_param_gather", True), ("overlap_param_gather", False), "there is no overlapped gather to align"),
    _pair(
        ("overlap_param_gather_with_optimizer_step", True),
        ("overlap_param_gather", False),
        "there is no overlapped gather to combine with the optimizer step",
    ),
    _pair(("overlap_param_gather_with_optimizer_step", True), ("use_distributed_optimizer", False), _ONLY_SHARDED),
)
"""For the overlap callback."""


def _two_stages(setting: tuple[str, bool]) -> Conflict:
    name, value = setting
    return Conflict(
        "two-interleaved-stages-overlap-messages",
        ((f"{_MODEL}.{name}", value), _CHUNKS),
        "with two stages, only messages that overlap, which are not batched, keep their order",
        f"Set {name}={not value}, leave it unset, use more stages, or leave virtual_pipeline_model_parallel_size unset.",
        lambda run: run.layout.interleaved and run.layout.pp == 2,
    )


_STAGES, _CHUNKS = "strategy.pipeline_model_parallel_size", "strategy.virtual_pipeline_model_parallel_size"
_OVERLAPPED = (f"{_MODEL}.overlap_p2p_comm", True)

BETWEEN_STAGES = (
    Conflict(
        "overlapped-messages-are-between-chunks",
        (_OVERLAPPED, _STAGES),
        "without virtual stages there is no computation to overlap with",
        "Leave overlap_p2p_comm unset, or set strategy.virtual_pipeline_model_parallel_size.",
        lambda run: run.layout.pp > 1 and not run.layout.interleaved,
    ),
    # Otherwise each rank posts two sends to the same peer in an order that the peer doesn't expect, and trains on the wrong
    # activations without a word. Megatron-LM's arguments.py refuses it for this reason; the core alone does not.
    _two_stages(("overlap_p2p_comm", False)),
    _two_stages(("batch_p2p_comm", True)),
    Conflict(
        "messages-overlap-or-batch",
        (_OVERLAPPED, (f"{_MODEL}.batch_p2p_comm", True)),
        "a rank cannot wait for batched sends and receives one by one",
        "Leave batch_p2p_comm unset.",
        lambda run: run.layout.interleaved,
    ),
)
"""For every run: messages between stages. Only those between interleaved stages overlap, and they are either overlapped or
batched. Megatron-Core batches by default, and raises in the first step otherwise."""


class Requested:
    """The user's settings by field, as the rows above read them. Two equal settings of one field count as one.

    Rows about pipelines read the run's ``layout``. ``clashes`` has a sentence for each pair that differs.
    """

    def __init__(self, settings: Iterable[Setting], layout: Layout) -> None:
        self.layout = layout
        self._by_name: dict[str, Setting] = {}
        self.clashes: list[str] = []
        for setting in settings:
            first = self._by_name.setdefault(setting.name, setting)
            if first is not setting and not same(first.value, setting.value):
                self.clashes.append(
                    f"{first} contradicts {setting}. Both control the same setting. Remove one of them, or set both "
                    "to the same value."
                )

    def requested(self, field: str) -> Optional[Setting]:
        """The setting of a field ("model.config.overlap_p2p_comm"), wherever it was set."""
        return self._by_name.get(field.rpartition(".")[2])

    get = requested

    def in_force(self, field: str) -> Setting:
        owner, _, name = field.rpartition(".")
        return Setting(name, owner, self.layout.fields()[name])


def same(left: Any, right: Any) -> bool:
    """Whether two settings are equal. A dataclass of userbuffer settings equals a dict with the same values."""
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        left = dataclasses.asdict(left)
    if dataclasses.is_dataclass(right) and not isinstance(right, type):
        right = dataclasses.asdict(right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return dict(left) == dict(right)
    return type(left) is type(right) and left == right


def refuse_conflicts(facts: OverlapFacts, settings: Iterable[Setting]) -> None:
    """Refuse settings that contradict each other or the layout.

    Raises:
        ConfigError: there are some. The message has a sentence for each.
    """
    requested = Requested(settings, facts.layout)
    problems = [(RULE, clash) for clash in requested.clashes]
    problems += [(row.rule, problem) for row in (*PAIRS, *BETWEEN_STAGES) if (problem := row.problem(requested))]
    problems += [(RULE, sentence) for sentence in _with_megatron_fsdp(facts, requested)]
    bucket_size, num_buckets = requested.get("bucket_size"), requested.get("num_buckets")
    if bucket_size is not None and num_buckets is not None and None not in (bucket_size.value, num_buckets.value):
        problems.append(
            (RULE, f"{bucket_size} contradicts {num_buckets}: each of them determines the other. Remove one of them.")
        )
    if problems:
        raise ConfigError("\n".join(sentence for _, sentence in problems), rules=[rule for rule, _ in problems])


def _with_megatron_fsdp(facts: OverlapFacts, requested: Requested) -> Iterator[str]:
    for name in facts.always_overlapped:
        off = requested.get(name)
        if off is not None and off.value is False:
            yield f"{off} contradicts strategy.fsdp='megatron', which always overlaps this communication. Remove {name}."
    reduced = requested.get("overlap_grad_reduce")
    if facts.not_overlapped and reduced is not None and reduced.value:
        yield f"{reduced} contradicts strategy.fsdp='megatron': {facts.not_overlapped}. Remove overlap_grad_reduce."


# --------------------------------------------------------------------------------------------------------------- rules

Decisions = dict[str, Decision]


def _tensor_parallel(facts: OverlapFacts, decided: Decisions) -> None:
    if facts.layout.tp < 2:
        obstacle = f"tensor_model_parallel_size is {facts.layout.tp}"
    elif not facts.layout.sp:
        obstacle = "sequence_parallel is off"
    else:
        obstacle = facts.transformer_engine_missing or facts.without_buffers
    if obstacle is not None:
        _turn_off(decided, "tp_comm_overlap", obstacle)
    decided.setdefault("tp_comm_overlap", Decision(False, "not requested"))
    if not decided["tp_comm_overlap"].value:
        _leave_out(decided, "tp_comm_overlap_cfg", "tp_comm_overlap is off")
        return
    from nemo2.mcore.overlap.presets import choose_userbuffers

    # MPI needs its own launcher, whereas NCCL is available in every run.
    decided.setdefault("tp_comm_bootstrap_backend", Decision("nccl", "works under every launcher"))
    requested = decided.get("tp_comm_overlap_cfg")
    value, reason = choose_userbuffers(facts, None if requested is None else requested.value)
    by_user = requested is not None and requested.value not in (None, "auto")
    decided["tp_comm_overlap_cfg"] = Decision(value, reason, by_user)
    _switches(value, decided)


def _switches(settings: Any, decided: Decisions) -> None:
    """Derive Megatron-Core's switches from the settings. An explicit switch may turn an overlap off, but not on."""
    set_by_hand = {name: decided[name].value for name in SWITCHES if name in decided}
    problems = [*unswitchable(settings), *switch_contradictions(settings, set_by_hand)]
    if problems:
        raise ConfigError("\n".join(problems))
    for name, value in switches_of(settings).items():
        gemms = ", ".join(SWITCHES[name])
        decided.setdefault(name, Decision(value, f"follows from tp_comm_overlap_cfg for {gemms}"))


def _pipeline(facts: OverlapFacts, decided: Decisions) -> None:
    if facts.layout.pp == 1:
        why = "pipeline_model_parallel_size is 1"
        for name in ("overlap_p2p_comm", "batch_p2p_comm"):
            _turn_off(decided, name, why)
            decided.setdefault(name, Decision(False, why))
        return
    batch = decided.get("batch_p2p_comm")
    if batch is not None and batch.value:
        overlap = Decision(False, "batch_p2p_comm is on")
    elif facts.layout.interleaved:
        overlap = Decision(True, "virtual pipeline stages leave computation to overlap with")
    else:
        overlap = Decision(False, "without virtual pipeline stages there is nothing to overlap with")
    overlapped = decided.setdefault("overlap_p2p_comm", overlap).value
    decided.setdefault(
        "batch_p2p_comm", Decision(not overlapped, "sends and receives are either overlapped or batched")
    )


def _embedding_gradient(facts: OverlapFacts, decided: Decisions) -> None:
    if facts.layout.pp == 1:
        _turn_off(decided, "defer_embedding_wgrad_compute", "pipeline_model_parallel_size is 1")
    elif not facts.fused_weight_gradients:
        _turn_off(
            decided,
            "defer_embedding_wgrad_compute",
            "the output layer does not fuse its weight gradient (gradient_accumulation_fusion, Apex)",
        )
    deferred = decided.get("defer_embedding_wgrad_compute")
    if deferred is None or not deferred.value:
        _leave_out(decided, "wgrad_deferral_limit", "defer_embedding_wgrad_compute is off", unused=0)


def _gradients(facts: OverlapFacts, decided: Decisions) -> None:
    if not facts.distributed_optimizer:
        # NeMo's callback doesn't change such a DDP config either.
        requested = decided.get("overlap_grad_reduce")
        if requested is None or not requested.value:
            _leave_out(decided, "bucket_size", ONE_BUCKET)
        return
    alone = facts.gradient_ranks == 1
    together = f"{facts.gradient_ranks} ranks reduce gradients together"
    why = "a single rank has no gradients to reduce" if alone else together
    if alone:
        _turn_off(decided, "overlap_grad_reduce", why)
    default = Decision(False, facts.not_overlapped) if facts.not_overlapped and not alone else Decision(not alone, why)
    reduced = decided.setdefault("overlap_grad_reduce", default).value
    if not reduced:
        _leave_out(decided, "bucket_size", ONE_BUCKET)
    if not alone and decided.get("num_buckets") is None:
        decided.setdefault("bucket_size", Decision(DEFAULT_BUCKET_SIZE, why))


def _parameters(facts: OverlapFacts, decided: Decisions) -> None:
    reduced = decided.get("overlap_grad_reduce")
    if not facts.distributed_optimizer:
        obstacle: Optional[str] = "optim.config.use_distributed_optimizer is off"
    elif facts.gradient_ranks == 1:
        obstacle = "a single rank holds all parameters"
    elif reduced is None or not reduced.value:
        # Without it Megatron-Core makes a single bucket, and the first layer waits for all of it.
        obstacle = "overlap_grad_reduce is off"
    else:
        obstacle = None
    if obstacle is None:
        default = Decision(True, f"{facts.gradient_ranks} ranks hold shards of the parameters")
        if not decided.setdefault("overlap_param_gather", default).value:
            obstacle = "overlap_param_gather is off"
    if obstacle is not None:
        for name in ("overlap_param_gather", "align_param_gather", "overlap_param_gather_with_optimizer_step"):
            _turn_off(decided, name, obstacle)
            if facts.distributed_optimizer:
                decided.setdefault(name, Decision(False, obstacle))
        return
    align = Decision(True, "all stages gather at the same time")
    if not facts.layout.interleaved:
        align = Decision(False, "there are no virtual pipeline stages")
        _turn_off(decided, "align_param_gather", align.reason)
        _turn_off(decided, "overlap_param_gather_with_optimizer_step", align.reason)
    decided.setdefault("align_param_gather", align)
    decided.setdefault("overlap_param_gather_with_optimizer_step", Decision(False, "not requested"))


def _context_parallel(facts: OverlapFacts, decided: Decisions) -> None:
    if facts.layout.cp == 1:
        decision = Decision(False, "context_parallel_size is 1")
    elif "p2p" in facts.context_messages:
        decision = Decision(True, "the ring sends the next block while attention works on this one")
    else:
        decision = Decision(False, f"model.config.cp_comm_type is {facts.context_messages!r}, not a ring")
    decided["cp_comm_overlap"] = decision


def _turn_off(decided: Decisions, name: str, obstacle: str) -> None:
    if name in decided and decided[name].value:
        decided[name] = Decision(False, obstacle)


def _leave_out(decided: Decisions, name: str, obstacle: str, unused: Any = None) -> None:
    """Give a detail of an overlap that is off Megatron-Core's default."""
    if name in decided and decided[name].value not in (None, "auto", "default", unused):
        decided[name] = Decision(unused, obstacle)
