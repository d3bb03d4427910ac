# SPDX-License-Identifier: Apache-2.0
"""Rules of the optimizer and its schedule."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from nemo2.base.backend.extras import has
from nemo2.base.names import did_you_mean
from nemo2.config.domains import out_of_range
from nemo2.mcore.optim.lr_scheduler import SCHEDULE, LRSchedule
from nemo2.mcore.settle.rows import UNSHARDED_OPTIMIZERS
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

OPTIMIZER = Topic("Optimizer and learning rate", needs_sizes=False)


@OPTIMIZER.rule("learning-rate-is-set")
def _rate(facts: Facts) -> Iterator[str]:
    """`optim.config.lr`, the peak learning rate of the schedule, must be set.

    Otherwise: The optimizer raises an error on every rank.
    """
    if facts.at("optim.config") is not None and facts.of_optimizer("lr") is None:
        yield "optim.config.lr is unset. Set the peak learning rate, e.g. optim.config.lr=3e-4."


@OPTIMIZER.rule("schedule-ends-below-its-peak")
def _end(facts: Facts) -> Iterator[str]:
    """`min_lr` must be at most the peak learning rate.

    Otherwise: The schedule raises an error on every rank.
    """
    problem = getattr(facts.parts.get("optim.lr_scheduler"), "peak_problem", lambda peak, field: None)
    for name in ("lr", "decoupled_lr"):
        rate = facts.of_optimizer(name)
        usable = isinstance(rate, int | float) and (rate > 0 or (name != "lr" and rate == 0))
        if usable and (message := problem(rate, name)):
            yield message


@OPTIMIZER.rule("final-rate-is-the-schedules")
def _final_rate(facts: Facts) -> Iterator[str]:
    """`optim.config.min_lr` and `optim.config.decoupled_min_lr` must be None or the `min_lr` of the schedule, which sets the
    rate of all parameters. A schedule of your own may read them.

    Otherwise: They have no effect, because they are read by Megatron-LM's scheduler only.
    """
    schedule = facts.parts.get("optim.lr_scheduler")
    if not hasattr(schedule, "lr_at"):
        return
    for name in ("min_lr", "decoupled_min_lr"):
        rate = facts.of_optimizer(name)
        if rate is not None and rate != schedule.min_lr:
            yield (
                f"optim.config.{name}={rate!r} contradicts optim.lr_scheduler.min_lr={schedule.min_lr:g}, the rate at which "
                f"the schedule of all parameters ends. Set optim.lr_scheduler.min_lr, and leave optim.config.{name} unset."
            )


@OPTIMIZER.rule("schedule-has-a-length")
def _length(facts: Facts) -> Iterator[str]:
    """A schedule that depends on the length of the run must get this length from `trainer.max_steps` or from its
    own `max_steps`.

    Otherwise: The schedule raises an error on every rank.
    """
    problem = getattr(facts.parts.get("optim.lr_scheduler"), "length_problem", None)
    if problem and facts.at("trainer.max_steps") in (None, -1):
        yield problem


@OPTIMIZER.rule("phases-fit-the-schedule")
def _phases(facts: Facts) -> Iterator[str]:
    """A schedule with its own length (`lr_scheduler.max_steps`) must be longer than its warm-up, hold and constant
    phases together. Phases that are set as shares must add up to at most 1, and the warm-up share must be less than
    1. A warm-up, hold and decay (WSD) schedule must have a warm-up or a hold.

    Otherwise: The learning rate never reaches its peak or jumps to its end, without an error.
    """
    path = "optim.lr_scheduler"
    schedule = facts.parts.get(path)
    if not isinstance(schedule, LRSchedule):
        return
    settings: dict[str, Any] = {name: getattr(schedule, name, None) for name in SCHEDULE}
    shares = {name: settings[name] for name in ("warmup_ratio", "hold_ratio") if settings[name] is not None}
    shown = " + ".join(f"{name}={value:g}" for name, value in shares.items())
    if sum(shares.values()) > 1:
        yield (
            f"{path}: {shown} add up to {sum(shares.values()):g}, but shares of max_steps must add up to at most 1. "
            "Lower one of them."
        )
    elif shares.get("warmup_ratio") == 1:
        yield f"{path}.warmup_ratio=1: the warm-up takes the whole run. Set warmup_ratio below 1."
    name = type(schedule).__name__
    if name == "WarmupHoldAnnealScheduler" and not shares:
        yield (
            f"{path}: {name} has neither a warm-up nor a hold. Set warmup_ratio and hold_ratio, e.g. to 0.01 and 0.8, "
            "or use PolynomialDecayAnnealingScheduler, which decays from the first step."
        )
    length = settings["max_steps"]
    # T5's constant steps are its warm-up, not a phase at the end.
    phases = {"warmup_steps": 0 if shares.get("warmup_ratio") is not None else settings["warmup_steps"]}
    phases |= {"hold_steps": settings["hold_steps"]}
    phases |= {"constant_steps": settings["constant_steps"] if name == "CosineAnnealingScheduler" else None}
    steps = {phase: value for phase, value in phases.items() if value}
    if length is not None and steps and sum(steps.values()) >= length:
        listed = " + ".join(f"{phase}={value:g}" for phase, value in steps.items())
        yield (
            f"{path}.max_steps={length:g} leaves no steps for the decay after {listed}. Raise max_steps, or shorten "
            f"these phases to less than {length:g} steps together."
        )


@OPTIMIZER.rule("optimizer-is-known")
def _known(facts: Facts) -> Iterator[str]:
    """`optim.config.optimizer` must be an optimizer that nemo2 can save and resume: adam or sgd, and from Megatron-Core 0.19
    on also muon and lion, which require the package emerging-optimizers.

    Otherwise: Megatron-Core raises an error when it creates the optimizer, at the first save, or when a run resumes.
    """
    name, known = facts.of_optimizer("optimizer"), known_optimizers()
    if isinstance(name, str) and name not in known:
        yield f"optim.config.optimizer={name!r}: must be one of {', '.join(known)}{did_you_mean(name, known, listed=True)}"
    elif facts.here and name not in ("adam", "sgd", None) and not has("emerging_optimizers"):
        yield (
            f"optim.config.optimizer={name!r} requires the package emerging-optimizers, which is not installed. Run "
            "`pip install 'emerging-optimizers>=0.2,<1'`, or set optim.config.optimizer=adam."
        )
    if facts.of_optimizer("use_layer_wise_distributed_optimizer"):
        yield (
            "optim.config.use_layer_wise_distributed_optimizer=True: no run can resume from the checkpoints of this "
            "optimizer. Leave it unset."
        )


@OPTIMIZER.settled("distributed-optimizer-is-adams")
def _sharded() -> None:
    """`use_distributed_optimizer` requires Adam. Megatron-Core shards no other state.

    Otherwise: The strategy raises an error on every rank. Megatron-Core would end with sgd, and train the replicas apart with
    muon and lion, because each would step on gradients that are complete only for its own shard.
    """


@OPTIMIZER.rule("steps-are-megatron-cores")
def _steps(facts: Facts) -> Iterator[str]:
    """Gradients must be clipped by `optim.config.clip_grad` and accumulated over the micro-batches of
    `data.global_batch_size`, not by Lightning.

    Otherwise: The strategy raises an error on every rank, because Lightning would clip only the shards of one rank, and count
    one batch several times.
    """
    from nemo2.training.strategies.base import requests_of_lightning

    if facts.has_layout:
        yield from requests_of_lightning(facts.trainer)


@OPTIMIZER.rule("offloaded-optimizer-decouples-decay")
def _offload(facts: Facts) -> Iterator[str]:
    """`optimizer_cpu_offload` requires `decoupled_weight_decay`.

    Otherwise: Megatron-Core raises an AssertionError when it creates the optimizer.
    """
    if not facts.of_optimizer("optimizer_cpu_offload"):
        return
    if facts.of_optimizer("decoupled_weight_decay", True) is False:
        yield (
            "optim.config.optimizer_cpu_offload=True with decoupled_weight_decay=False: Megatron-Core can offload "
            "only AdamW, which decouples weight decay. Set decoupled_weight_decay=True."
        )


@OPTIMIZER.rule("offloaded-optimizer-is-precision-aware")
def _offloaded_copies(facts: Facts) -> Iterator[str]:
    """`optimizer_cpu_offload` requires `use_precision_aware_optimizer`, and an `optimizer_offload_fraction` above
    0.

    Otherwise: The run trains and saves, but no run can resume from its checkpoints: Megatron-Core raises a KeyError.
    With a fraction of 0 nothing is offloaded.
    """
    # Megatron-LM's arguments.py requires it too. Otherwise the optimizer's parameters are fp32 shards, of which
    # ``HybridDeviceOptimizer._update_fp32_params_by_new_state`` looks for fp32 copies.
    if not facts.of_optimizer("optimizer_cpu_offload") or facts.machine.accelerator == "cpu":
        return
    if not facts.of_optimizer("use_precision_aware_optimizer"):
        yield (
            "optim.config.optimizer_cpu_offload=True requires optim.config.use_precision_aware_optimizer=True. Set both to True, "
            "or both to False."
        )
    if not facts.of_optimizer("optimizer_offload_fraction"):
        yield (
            "optim.config.optimizer_cpu_offload=True with optimizer_offload_fraction=0.0 offloads nothing. Set "
            "optimizer_offload_fraction=1.0, or a smaller share above 0."
        )


@OPTIMIZER.rule("optimizer-numbers-are-in-range")
def _numbers(facts: Facts) -> Iterator[str]:
    """Each number of the optimizer configuration must be in its valid range and must not be NaN or infinite: for
    example, a learning rate above 0, decay rates from 0 to below 1, and a clipping norm that is not negative.

    Otherwise: PyTorch raises an error on every rank, the moments grow without bound, or the weights are NaN after the
    first step.
    """
    yield from out_of_range(facts.at("optim"), "optim", domains.OPTIMIZER_MODULE)
    yield from out_of_range(facts.at("optim.config"), "optim.config", domains.OPTIMIZER)


def known_optimizers() -> tuple[str, ...]:
    """The optimizers that the installed Megatron-Core makes and whose state nemo2 saves and loads.

    Of Megatron-Core's others, SOAP's state has no form in a checkpoint, and that of the ``dist_`` ones can't be read again.
    Adaptive muon ends at its first step: Megatron-Core 0.19's class doesn't call the constructor of emerging-optimizers 0.3.
    """
    emerging = find_spec("megatron.core.optimizer.emerging_optimizers")  # from 0.19 on
    return ("adam", *UNSHARDED_OPTIMIZERS) if emerging else ("adam", "sgd")
