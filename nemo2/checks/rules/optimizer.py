# SPDX-License-Identifier: Apache-2.0
"""The optimizer and its schedule."""

from collections.abc import Iterator
from typing import Any

from nemo2.checks import domains
from nemo2.checks.domains import out_of_range
from nemo2.checks.facts import Facts
from nemo2.checks.rule import Topic
from nemo2.config.walk import class_of
from nemo2.names import did_you_mean

OPTIMIZER = Topic("Optimizer and learning rate", needs_sizes=False)
_STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@OPTIMIZER.rule(
    "learning-rate-is-set",
    says="`optim.config.lr`, the peak of the schedule, is set.",
    otherwise="The optimizer refuses on every rank.",
    broken="optim.config.lr=None",
    mended="optim.config.lr=3e-4",
)
def _rate(facts: Facts) -> Iterator[str]:
    config = getattr(getattr(facts.recipe, "optim", None), "config", None)
    if config is None:
        return
    if getattr(config, "lr", None) is None:
        yield "optim.config.lr is unset: set the peak learning rate, e.g. optim.config.lr=3e-4."


@OPTIMIZER.rule(
    "schedule-ends-below-its-peak",
    says="`min_lr` is at most the peak.",
    otherwise="The schedule refuses on every rank.",
    broken="optim.config.lr=1e-5",
    mended="optim.config.lr=1e-5 optim.lr_scheduler.min_lr=1e-6",
)
def _end(facts: Facts) -> Iterator[str]:
    least = getattr(getattr(getattr(facts.recipe, "optim", None), "lr_scheduler", None), "min_lr", None)
    for name in ("lr", "decoupled_lr"):
        rate = facts.of_optimizer(name)
        if not isinstance(rate, int | float) or not isinstance(least, int | float) or (name == "lr" and rate <= 0):
            continue
        if least > rate:
            peak = f"optim.config.{name}={rate:g}"
            yield f"optim.lr_scheduler.min_lr={least:g} is above the peak {peak}: lower it, or raise the peak."


@OPTIMIZER.rule(
    "schedule-has-a-length",
    says="A schedule that ends knows when: `trainer.max_steps`, or its own.",
    otherwise="The schedule refuses on every rank.",
    broken="trainer.max_steps=-1",
    mended="trainer.max_steps=-1 trainer.max_epochs=1 optim.lr_scheduler.max_steps=100000",
)
def _length(facts: Facts) -> Iterator[str]:
    schedule = facts.parts.get("optim.lr_scheduler")
    if schedule is None or not getattr(schedule, "needs_max_steps", False):
        return
    steps = getattr(facts.trainer, "max_steps", None)
    if schedule.max_steps is None and (not isinstance(steps, int) or steps <= 0):
        yield (
            f"{type(schedule).__name__}.max_steps is None and the trainer has no max_steps: this schedule is a fraction of the "
            "run's length. Set trainer.max_steps, or the schedule's max_steps."
        )


@OPTIMIZER.rule(
    "phases-fit-the-schedule",
    says="A schedule with a length of its own (`lr_scheduler.max_steps`) is longer than its warm-up, hold and constant end; "
    "shares of its length add up to at most 1; a warm-up is no share of 1; "
    "warm-up, hold and decay (WSD) has a warm-up or a hold.",
    otherwise="The rate never reaches its peak or jumps to its end, and nothing is said.",
    broken="optim.lr_scheduler.max_steps=1000",
    mended="optim.lr_scheduler.max_steps=100000",
)
def _phases(facts: Facts) -> Iterator[str]:
    node = getattr(getattr(facts.recipe, "optim", None), "lr_scheduler", None)
    if node is None or any(out_of_range(node, "", domains.SCHEDULE)):
        return
    path = "optim.lr_scheduler"
    given: dict[str, Any] = {name: getattr(node, name, None) for name in domains.SCHEDULE}
    shares = {name: given[name] for name in ("warmup_ratio", "hold_ratio") if given[name] is not None}
    shown = " + ".join(f"{name}={value:g}" for name, value in shares.items())
    if sum(shares.values()) > 1:
        yield f"{path}: {shown} add up to {sum(shares.values()):g}: shares of max_steps add up to at most 1."
    elif shares.get("warmup_ratio") == 1:
        yield f"{path}.warmup_ratio=1: the warm-up is the whole run. Use less than 1."
    name = getattr(class_of(node), "__name__", "")
    if name == "WarmupHoldAnnealScheduler" and not shares:
        yield (
            f"{path}: {name} has neither a warm-up nor a hold: set warmup_ratio and hold_ratio, e.g. 0.01 and 0.8, or use "
            "PolynomialDecayAnnealingScheduler, which decays from the first step."
        )
    length = given["max_steps"]
    # T5's constant steps stand for its warm-up; they are no phase at the end.
    phases = {"warmup_steps": 0 if shares.get("warmup_ratio") is not None else given["warmup_steps"]}
    phases |= {"hold_steps": given["hold_steps"]}
    phases |= {"constant_steps": given["constant_steps"] if name == "CosineAnnealingScheduler" else None}
    steps = {phase: value for phase, value in phases.items() if value}
    if length is not None and steps and sum(steps.values()) >= length:
        listed = " + ".join(f"{phase}={value:g}" for phase, value in steps.items())
        yield (
            f"{path}.max_steps={length:g} leaves no steps beside {listed}: raise it, or shorten the "
            f"phases to less than {length:g} steps together."
        )


@OPTIMIZER.rule(
    "optimizer-is-known",
    says="`optim.config.optimizer` is one that Megatron-Core has: adam or sgd, and in newer versions muon, lion and their like.",
    otherwise="Megatron-Core raises when the optimizer is made.",
    broken="optim.config.optimizer=adamw",
    mended="optim.config.optimizer=adam",
)
def _known(facts: Facts) -> Iterator[str]:
    name, known = facts.of_optimizer("optimizer"), known_optimizers()
    if isinstance(name, str) and name not in known:
        yield f"optim.config.optimizer={name!r}: must be one of {', '.join(known)}{did_you_mean(name, known)}"


@OPTIMIZER.rule(
    "distributed-optimizer-is-adams",
    says="`use_distributed_optimizer` shards the state of Adam, and sgd has none that it knows.",
    otherwise="Megatron-Core asserts when the optimizer is made.",
    broken="optim.config.optimizer=sgd",
    mended="optim.config.optimizer=adam",
)
def _sharded(facts: Facts) -> Iterator[str]:
    if facts.of_optimizer("optimizer") == "sgd" and facts.distributed_optimizer:
        yield (
            "optim.config.optimizer='sgd' with use_distributed_optimizer=True: Megatron-Core shards only Adam's state. Use "
            "'adam', or set optim.config.use_distributed_optimizer=False."
        )


@OPTIMIZER.rule(
    "clipping-is-the-optimizers",
    says="Gradients are clipped by `optim.config.clip_grad`.",
    otherwise="Lightning's clipping sees one rank's shards only; the precision plugin refuses in the first step.",
    broken="trainer.gradient_clip_val=1.0",
    mended="optim.config.clip_grad=1.0",
)
def _clipping(facts: Facts) -> Iterator[str]:
    value = getattr(facts.trainer, "gradient_clip_val", None)
    if facts.sizes and value:
        yield (
            f"trainer.gradient_clip_val={value}: Megatron-Core clips inside its optimizer step. Set "
            f"optim.config.clip_grad={value} and leave trainer.gradient_clip_val unset."
        )


@OPTIMIZER.rule(
    "small-states-need-the-aware-optimizer",
    says="Gradients, parameters and moments of the optimizer in other formats than fp32 need `use_precision_aware_optimizer`.",
    otherwise="Megatron-Core asserts when the optimizer's configuration is made.",
    broken="optim.config.exp_avg_dtype=torch.bfloat16",
    mended="optim.config.exp_avg_dtype=torch.float32",
)
def _states(facts: Facts) -> Iterator[str]:
    if facts.of_optimizer("use_precision_aware_optimizer"):
        return
    for name in _STATES:
        dtype = facts.of_optimizer(name)
        if dtype is not None and str(dtype) != "torch.float32":
            yield (
                f"optim.config.{name}={dtype} needs optim.config.use_precision_aware_optimizer=True: set that, or leave it "
                "torch.float32."
            )


@OPTIMIZER.rule(
    "aware-optimizer-is-sharded-adam",
    says="`use_precision_aware_optimizer` needs Adam and the distributed optimizer.",
    otherwise="Megatron-Core asserts when the optimizer's configuration is made.",
    broken="optim.config.use_precision_aware_optimizer=True optim.config.optimizer=sgd",
    mended="optim.config.use_precision_aware_optimizer=True optim.config.optimizer=adam",
)
def _aware(facts: Facts) -> Iterator[str]:
    if not facts.of_optimizer("use_precision_aware_optimizer"):
        return
    if facts.of_optimizer("optimizer") != "adam":
        yield (
            f"optim.config.use_precision_aware_optimizer=True with optim.config.optimizer={facts.of_optimizer('optimizer')!r}: "
            "it is made for 'adam'. Use that, or unset it."
        )
    if not facts.distributed_optimizer:
        yield (
            "optim.config.use_precision_aware_optimizer=True needs the sharded state of "
            "optim.config.use_distributed_optimizer=True: set both, or neither."
        )


@OPTIMIZER.rule(
    "offloaded-optimizer-decouples-decay",
    says="`optimizer_cpu_offload` needs `decoupled_weight_decay`.",
    otherwise="Megatron-Core asserts when the optimizer is made.",
    broken="optim.config.optimizer_cpu_offload=True optim.config.decoupled_weight_decay=False",
    mended="optim.config.optimizer_cpu_offload=True optim.config.decoupled_weight_decay=True",
)
def _offload(facts: Facts) -> Iterator[str]:
    if not facts.of_optimizer("optimizer_cpu_offload"):
        return
    if facts.of_optimizer("decoupled_weight_decay", True) is False:
        yield (
            "optim.config.optimizer_cpu_offload=True with decoupled_weight_decay=False: Megatron-Core's offloaded Adam is AdamW. "
            "Set decoupled_weight_decay=True."
        )


@OPTIMIZER.rule(
    "optimizer-numbers-are-in-range",
    says="Each number of the optimizer's configuration is one that it can compute with: a learning rate above 0, decay rates "
    "from 0 to below 1, a norm to clip at that is not negative; none is NaN or infinite.",
    otherwise="torch refuses on every rank, the moments grow without bound, or the weights are NaN after the first step.",
    broken="optim.config.adam_beta2=1.5 optim.config.clip_grad=-1",
    mended="optim.config.adam_beta2=0.95 optim.config.clip_grad=0",
)
def _numbers(facts: Facts) -> Iterator[str]:
    optim = getattr(facts.recipe, "optim", None)
    yield from out_of_range(optim, "optim", domains.OPTIMIZER_MODULE)
    yield from out_of_range(getattr(optim, "config", None), "optim.config", domains.OPTIMIZER)


def known_optimizers() -> tuple[str, ...]:
    """The optimizers that the installed Megatron-Core's ``get_megatron_optimizer`` makes."""
    try:
        # 0.19; what its registry has depends on the package emerging-optimizers.
        from megatron.core.optimizer import emerging_optimizers as emerging  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return ("adam", "sgd")
    names = getattr(emerging, "_EMERGING_OPTIMIZERS", {})
    return tuple(dict.fromkeys(("adam", "sgd", "lion", *names, *(f"dist_{name}" for name in names))))
