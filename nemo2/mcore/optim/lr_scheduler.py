# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules under NeMo 2.0's names.

Each schedule is a small configurable class with one pure function, ``lr_at(step, max_lr)``. You can plot, test and
compare a run's learning rate without an optimizer. ``step`` counts optimizer steps from 0, and ``max_lr`` is the peak
learning rate in the optimizer's configuration.

The formulas and their corner cases are those of NeMo's ``nemo.core.optim.lr_scheduler``. Two of NeMo's classes fail,
because they lack parameters that their formulas need: T5 and Noam-hold. Here these parameters are added at the end of
the signature.

Parameters that the schedules share:

``max_steps``
    The length of the schedule in optimizer steps. ``None``: the trainer's ``max_steps``. Afterwards the rate is ``min_lr``.
``min_lr``
    The rate at the end of the decay. An absolute rate, not a fraction of the peak.
``warmup_steps``, ``warmup_ratio``
    A linear warm-up over steps 0..w, ``max_lr * (step + 1) / (w + 1)``. The ratio is a fraction of ``max_steps`` and
    overrides a ``warmup_steps`` at its default.
``hold_steps``, ``hold_ratio``
    The length of a hold at ``max_lr`` after the warm-up, in optimizer steps or as a fraction of ``max_steps``. Set at most
    one of them. ``None`` for both: no hold, and the decay's formula starts at step 0, as in NeMo.
``interval``, ``frequency``, ``monitor``
    Passed to Lightning: how often the schedule advances, and the metric that it watches. None of these schedules
    watches a metric.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Optional

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.lr_scheduler import LRScheduler

from nemo2.base.errors import ConfigError
from nemo2.config.capture import configurable
from nemo2.config.domains import Choice, Domain, refuse_out_of_range
from nemo2.config.notices import warn_without_effect

_DEFAULT_WARMUP_STEPS = 750
LR_FACTOR = "lr_factor"
"""The key of a parameter group's ``lr_mult``, by which its whole learning rate is multiplied, ``min_lr`` included. The rates
in the group contain it."""

_STEPS = Domain("[0, inf)", "a number of steps", "steps")
_SHARE = Domain("[0, 1]", "a share of max_steps")
SCHEDULE: Mapping[str, Domain | Choice] = {
    "max_steps": Domain("[1, inf)", "the length of the schedule", "steps", unless="set None to use trainer.max_steps"),
    "warmup_steps": _STEPS,
    "hold_steps": _STEPS,
    "constant_steps": _STEPS,
    "warmup_ratio": _SHARE,
    "hold_ratio": _SHARE,
    "min_lr": Domain("[0, inf)", "a learning rate"),
    "interval": Choice(("step", "epoch"), "when Lightning advances the schedule"),
    "frequency": Domain("[1, inf)", "the number of steps between two updates of the learning rate", "whole"),
    "d_model": Domain("[1, inf)", "the learning rate is divided by its square root", "whole"),
    "decay_rate": Domain("[0, inf)", "an exponent; with a negative value, the learning rate would rise"),
    "power": Domain("[0, inf)", "an exponent; with a negative value, the learning rate would have no limit"),
    "decay_schedule": Choice(("linear", "one_minus_square_root"), "the curves of the decay"),
}
"""The valid values of the fields of schedules."""


class LRSchedulerModule(Callback, ABC):
    """Make the learning-rate scheduler of an optimizer. The module is also a Lightning callback.

    To use your own scheduler, subclass this class. ``scheduler`` returns a torch scheduler or the dictionary that
    Lightning's ``configure_optimizers`` documents.
    """

    max_steps: Optional[int] = None
    interval: str = "step"
    frequency: int = 1
    monitor: str = "val_loss"
    min_lr: float = 0.0
    warmup_steps: Optional[int] = None
    warmup_ratio: Optional[float] = None
    hold_steps: Optional[int] = None
    hold_ratio: Optional[float] = None

    def connect(self, model: Any, optimizer: Any) -> None:
        """A hook that runs before ``scheduler``, with the run's `model` and `optimizer`."""

    @abstractmethod
    def scheduler(self, model: Any, optimizer: Any) -> Any:
        """The scheduler that drives `optimizer`."""

    def __call__(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Lightning's description of a scheduler: ``scheduler``, ``interval``, ``frequency``, ``monitor``."""
        self.connect(model, optimizer)
        scheduler = self.scheduler(model, optimizer)
        described = {"interval": self.interval, "frequency": self.frequency, "monitor": self.monitor}
        if not isinstance(scheduler, Mapping):
            return {"scheduler": scheduler, **described}
        if "lr_scheduler" in scheduler:  # NeMo's form: {"optimizer": ..., "lr_scheduler": {...}, "monitor": ...}
            inner = scheduler["lr_scheduler"]
            inner = inner if isinstance(inner, Mapping) else {"scheduler": inner}
            outer = {"monitor": scheduler["monitor"]} if "monitor" in scheduler else {}
            return {**described, **outer, **inner}
        return {**described, **scheduler}


@dataclass(eq=False)
class LRSchedule(LRSchedulerModule):
    """A schedule that is a function of the step. Its fields are those that all schedules share, and come last."""

    needs_max_steps: ClassVar[bool] = True
    """Whether the formula needs the length of the run."""
    domains: ClassVar[Mapping[str, Domain | Choice]] = SCHEDULE
    """The valid values of the fields."""

    _: KW_ONLY
    interval: str = "step"
    frequency: int = 1
    monitor: str = "val_loss"

    @abstractmethod
    def lr_at(self, step: int, max_lr: float) -> float:
        """The learning rate of optimizer step `step` (from 0) for a parameter group whose peak is `max_lr`."""

    def scheduler(self, model: Any, optimizer: Any) -> "StepSchedule":
        """A scheduler at step 0. The optimizer's learning rates are already those of step 0.

        Raises:
            ConfigError: `min_lr` is above a group's peak, or the formula needs the length of the run, which is unset.
        """
        schedule = self
        if self.max_steps is None:
            trainer_steps = _trainer_steps(model)
            if trainer_steps is not None:
                schedule = replace(self, max_steps=trainer_steps)  # pyright: ignore[reportArgumentType]
            elif problem := self.length_problem:
                raise ConfigError(problem)
        if words := schedule._left_out():
            rank_zero_info("%s: %s", type(self).__name__, words)
        return StepSchedule(schedule, optimizer)

    @property
    def length_problem(self) -> Optional[str]:
        """Why a run needs ``trainer.max_steps`` for this schedule. None: it doesn't."""
        shares = self.warmup_ratio or self.hold_ratio
        if self.max_steps is not None or not (self.needs_max_steps or shares):
            return None
        return (
            f"{type(self).__name__}.max_steps is None and trainer.max_steps is not set, but this schedule depends on the "
            "length of the run. Set trainer.max_steps, or the schedule's max_steps."
        )

    def peak_problem(self, peak: float, field: str = "lr") -> Optional[str]:
        """Why the schedule can't start from ``peak``, the value of this field of the optimizer. None: it can."""
        if self.min_lr <= peak:
            return None
        return (
            f"optim.lr_scheduler.min_lr={self.min_lr:g} is above the peak learning rate optim.config.{field}={peak:g}. Lower "
            "min_lr (a tenth of the peak is usual), or raise the peak."
        )

    def _left_out(self) -> str:
        """The phases of the schedule that a run of this length doesn't reach. "": it reaches all of them."""
        length, ratio = self.max_steps, self.warmup_ratio
        warmup = self.warmup_steps if length is None or ratio is None else ratio * length
        if length is None or not warmup or warmup < length:
            return ""
        return (
            f"the warm-up of {warmup:g} steps does not end within this run of {length:g} steps, so the learning rate "
            "never reaches its peak."
        )

    def __post_init__(self) -> None:
        name = type(self).__name__
        refuse_out_of_range(vars(self), "optim.lr_scheduler", self.domains)
        if self.hold_steps is not None and self.hold_ratio is not None:
            raise ConfigError(f"{name}: hold_steps and hold_ratio both set the length of the hold. Set one of them.")
        if self.warmup_ratio is not None and self.warmup_steps not in (None, _DEFAULT_WARMUP_STEPS):
            raise ConfigError(
                f"{name}: warmup_steps and warmup_ratio both set the length of the warm-up. Set one of them."
            )

    # Phases that the formulas share.

    def _length(self) -> float:
        """The optimizer steps in the schedule. Infinite if the run has no known end."""
        if self.max_steps is not None:
            return self.max_steps
        if self.needs_max_steps:
            raise ConfigError(f"{type(self).__name__}.max_steps is None. Set max_steps to evaluate the schedule.")
        return math.inf

    def _steps(self, steps: Optional[int], ratio: Optional[float]) -> int:
        if ratio is not None:
            if self.max_steps is None:
                raise ConfigError(
                    f"{type(self).__name__}.max_steps is None, but ratios are fractions of max_steps. Set max_steps."
                )
            return int(ratio * self.max_steps)
        return steps or 0

    def _warmup_end(self) -> int:
        return self._steps(self.warmup_steps, self.warmup_ratio)

    def _hold_end(self) -> int:
        """The step at which the hold ends. As in NeMo it is 0, not the end of the warm-up, if there is no hold."""
        if self.hold_steps is None and self.hold_ratio is None:
            return 0
        return self._steps(self.hold_steps, self.hold_ratio) + self._warmup_end()

    def _phased(self, step: int, max_lr: float) -> Optional[float]:
        """The rate during warm-up, during the hold and after the end. None while the schedule's own formula applies."""
        warmup_end = self._warmup_end()
        if warmup_end > 0 and step <= warmup_end:
            return max_lr * (step + 1) / (warmup_end + 1)
        if warmup_end <= step < self._hold_end():
            return max_lr
        return self.min_lr if step > self._length() else None


class _PhasedSchedule(LRSchedule):
    """A schedule that has a formula of its own between the phases that all share. Without one it keeps ``max_lr``."""

    def lr_at(self, step: int, max_lr: float) -> float:
        phased = self._phased(step, max_lr)
        return self._formula(step, max_lr) if phased is None else phased

    def _formula(self, step: int, max_lr: float) -> float:
        return max_lr


@dataclass(eq=False)
class _Annealing(_PhasedSchedule):
    """The fields of schedules that decay from the start, in NeMo's order."""

    max_steps: Optional[int] = None
    min_lr: float = 0.0


class StepSchedule(LRScheduler):
    """Apply an `LRSchedule` to every parameter group of an optimizer.

    The peak of a group is its ``max_lr``, which Megatron-Core writes. Without it the peak is ``initial_lr``, else the
    ``lr`` at the time the scheduler is made. The rate is multiplied by the group's ``lr_mult`` if it has one. Groups
    that an optimizer module's ``lr_mult`` scales follow the schedule of the other groups times that factor.

    The scheduler works with any object that has ``param_groups``, so with Megatron-Core's optimizers and torch's. It
    therefore doesn't call torch's constructor, which requires a ``torch.optim.Optimizer`` and patches ``step``.

    A checkpoint restores the position. The curve is that of the run's recipe, so a resumed run may have another length
    or peak. The scheduler reports such a difference once.

    Args:
        schedule: The formula of the learning rate.
        optimizer: An object with ``param_groups``. Their rates become those of step 0.
    """

    def __init__(self, schedule: LRSchedule, optimizer: Any) -> None:
        self.schedule = schedule
        self.optimizer = optimizer
        self.base_lrs: list[float] = []
        """The peak of each group, before its `LR_FACTOR`."""
        for group in optimizer.param_groups:
            peak, factor = group.get("max_lr"), group.get(LR_FACTOR, 1.0)
            if peak is None:
                peak = group.setdefault("initial_lr", group["lr"])
            self.base_lrs.append(float(peak) / factor if factor else schedule.min_lr)
        for peak in self.base_lrs:
            if problem := schedule.peak_problem(peak):
                raise ConfigError(problem)
        self.last_epoch = 0
        self._apply()

    def _apply(self) -> None:
        groups = self.optimizer.param_groups
        rates = [self.schedule.lr_at(self.last_epoch, peak) for peak in self.base_lrs]
        self._last_lr = [
            rate * group.get("lr_mult", 1.0) * group.get(LR_FACTOR, 1.0)
            for rate, group in zip(rates, groups, strict=True)
        ]
        for group, rate in zip(groups, self._last_lr, strict=True):
            group["lr"] = rate

    def step(self, epoch: Optional[int] = None) -> None:
        """Advance by one optimizer step, or to step `epoch` if it is given.

        Steps that the optimizer skipped because fp16 gradients overflowed don't count, as in Megatron-LM's training
        loop.
        """
        if epoch is None and not getattr(self.optimizer, "update_successful", True):
            return
        self.last_epoch = self.last_epoch + 1 if epoch is None else int(epoch)
        self._apply()

    def get_last_lr(self) -> list[float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rate of each group at the current step."""
        return [float(rate) for rate in self._last_lr]

    get_lr = get_last_lr  # pyright: ignore[reportAssignmentType]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the parameters of the curve for the comparison on load."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs), "schedule": self._describe()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to the saved step and set that step's learning rates."""
        # The layout decides how many groups of parameters a rank has.
        before = {"base_lrs": {*state_dict["base_lrs"]}, **state_dict.get("schedule", {})}
        now = {"base_lrs": {*self.base_lrs}, **self._describe()}
        changed = [f"{name}: {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
        if changed:
            rank_zero_info(f"The learning-rate schedule differs from the checkpoint's: {'; '.join(changed)}.")
        self.last_epoch = int(state_dict["last_epoch"])
        self._apply()

    def _describe(self) -> dict[str, Any]:
        values = {field.name: getattr(self.schedule, field.name) for field in fields(self.schedule)}  # pyright: ignore[reportArgumentType]
        return {"name": type(self.schedule).__name__, **values}


@configurable
@dataclass(eq=False)
class CosineAnnealingScheduler(LRSchedule):
    """Decay along half a cosine from ``max_lr`` after the warm-up to ``min_lr``.

    ``constant_steps`` > 0 selects Megatron-LM's variant: the decay ends that many steps before ``max_steps``, and the
    warm-up is ``max_lr * step / warmup_steps``, which starts from 0.
    """

    max_steps: Optional[int] = None
    warmup_steps: int = _DEFAULT_WARMUP_STEPS
    constant_steps: int = 80000
    """Steps at ``min_lr`` before ``max_steps``. Above 0 it also selects Megatron-LM's warm-up."""
    min_lr: float = 6e-5

    def _left_out(self) -> str:
        if (words := super()._left_out()) or not self.constant_steps:
            return words
        phases, length = self.warmup_steps + self.constant_steps, self._length()
        if phases < length:
            return ""
        return (
            f"warmup_steps={self.warmup_steps:g} and constant_steps={self.constant_steps:g} leave none of the "
            f"{length:g} steps of this run for the decay, so the learning rate drops from its peak to min_lr in one "
            "step. Set constant_steps=0."
        )

    def lr_at(self, step: int, max_lr: float) -> float:
        """``min_lr + (max_lr - min_lr) * (1 + cos(pi * t)) / 2`` with t from 0 to 1 between warm-up and the end."""
        if self.constant_steps and self.warmup_steps > 0 and step <= self.warmup_steps:
            return max_lr * step / self.warmup_steps
        if (phased := self._phased(step, max_lr)) is not None:
            return phased
        decay_steps = self._length() - self.warmup_steps - self.constant_steps
        decayed = step - self.warmup_steps
        if decay_steps <= 0 or decayed > decay_steps:
            return self.min_lr
        return self.min_lr + (max_lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * decayed / decay_steps))


@configurable
@dataclass(eq=False)
class WarmupPolicyScheduler(_PhasedSchedule):
    """Warm up, then keep ``max_lr``. Base of the schedules with a warm-up and without a hold."""

    needs_max_steps: ClassVar[bool] = False

    warmup_steps: Optional[int] = _DEFAULT_WARMUP_STEPS
    warmup_ratio: Optional[float] = None
    max_steps: Optional[int] = None
    min_lr: float = 0.0


@configurable
@dataclass(eq=False)
class WarmupAnnealingScheduler(WarmupPolicyScheduler):
    """Warm up, then decay linearly to ``min_lr``."""

    needs_max_steps: ClassVar[bool] = True

    def _formula(self, step: int, max_lr: float) -> float:
        """``min_lr + (max_lr - min_lr) * (1 - t)`` with t from 0 to 1 between warm-up and ``max_steps``."""
        warmup_end = self._warmup_end()
        return self.min_lr + (max_lr - self.min_lr) * (1 - _share(step - warmup_end, self._length() - warmup_end))


@configurable
@dataclass(eq=False)
class WarmupHoldPolicyScheduler(_PhasedSchedule):
    """Warm up, then keep ``max_lr``. Base of the schedules that decay after a hold."""

    needs_max_steps: ClassVar[bool] = False

    warmup_steps: Optional[int] = _DEFAULT_WARMUP_STEPS
    warmup_ratio: Optional[float] = None
    hold_steps: Optional[int] = None
    hold_ratio: Optional[float] = None
    max_steps: Optional[int] = None
    min_lr: float = 0.0


@configurable
@dataclass(eq=False)
class WarmupHoldAnnealScheduler(_PhasedSchedule):
    """Warm up, hold, decay (WSD): arXiv 2404.06395 (linear), arXiv 2408.11029 (one minus square root).

    Ratios are fractions of ``max_steps``. ``hold_ratio=None`` starts the decay's formula at step 0, as in NeMo, so the
    rate jumps at the end of the warm-up. ``hold_ratio=0.0`` starts it at the end of the warm-up.
    """

    warmup_ratio: Optional[float] = None
    hold_ratio: Optional[float] = None
    """The length of the hold as a fraction of ``max_steps``. None: the decay's formula starts at step 0."""
    max_steps: Optional[int] = None
    decay_schedule: Literal["one_minus_square_root", "linear"] = "linear"
    """The curve of the decay from ``max_lr`` to ``min_lr``."""
    min_lr: float = 0.0

    def _formula(self, step: int, max_lr: float) -> float:
        """``max_lr - (max_lr - min_lr) * t``, or ``max(min_lr, max_lr * (1 - sqrt(t)))``."""
        hold_end = self._hold_end()
        decayed = _share(step - hold_end, self._length() - hold_end)
        if self.decay_schedule == "linear":
            return max_lr - (max_lr - self.min_lr) * decayed
        return max(self.min_lr, max_lr * (1 - math.sqrt(decayed)))


@configurable
@dataclass(eq=False)
class SquareAnnealingScheduler(_Annealing):
    """Decay with the square of the remaining fraction of the run."""

    min_lr: float = 1e-5

    def _formula(self, step: int, max_lr: float) -> float:
        """``max(min_lr, max_lr * ((max_steps - step) / max_steps) ** 2)``."""
        return max(self.min_lr, max_lr * (1 - _share(step, self._length())) ** 2)


@configurable
@dataclass(eq=False)
class SquareRootAnnealingScheduler(_Annealing):
    """Decay with the square root of the remaining fraction of the run."""

    def _formula(self, step: int, max_lr: float) -> float:
        """``max(min_lr, max_lr * sqrt((max_steps - step) / max_steps))``."""
        return max(self.min_lr, max_lr * math.sqrt(1 - _share(step, self._length())))


@configurable
@dataclass(eq=False)
class InverseSquareRootAnnealingScheduler(_Annealing):
    """Decay with the inverse square root of the step. The rate is ``min_lr`` only after ``max_steps``."""

    needs_max_steps: ClassVar[bool] = False

    def _formula(self, step: int, max_lr: float) -> float:
        """``max_lr / sqrt(step + 1)``."""
        return max_lr / math.sqrt(step + 1)


@configurable
@dataclass(eq=False)
class T5InverseSquareRootAnnealingScheduler(_Annealing):
    """The T5 paper's schedule (arXiv 1910.10683, section 3.1.2), which ignores the optimizer's learning rate.

    ``constant_steps`` is the paper's k of 10**4. NeMo's class has no such parameter and fails without it.
    """

    needs_max_steps: ClassVar[bool] = False
    domains: ClassVar[Mapping[str, Domain | Choice]] = {
        **SCHEDULE,
        "constant_steps": Domain("[1, inf)", "the rate is 1 divided by its square root", "steps"),
    }

    constant_steps: int = 10_000
    """Steps during which the rate stays at ``1 / sqrt(constant_steps)``. At least 1."""

    def lr_at(self, step: int, max_lr: float) -> float:
        """``1 / sqrt(max(step, constant_steps))``, whatever `max_lr` is."""
        if step > self.constant_steps and step > self._length():
            return self.min_lr
        return 1 / math.sqrt(max(step, self.constant_steps))


@configurable
@dataclass(eq=False)
class NoamAnnealingScheduler(LRSchedule):
    """The Transformer paper's schedule (arXiv 1706.03762, section 5.3). The optimizer's learning rate is a factor, not
    the peak.

    The schedule has no end. ``max_steps`` only defines ``warmup_ratio``, and ``min_lr`` is a floor after the warm-up.
    """

    needs_max_steps: ClassVar[bool] = False

    d_model: int
    """The model's hidden size. At least 1."""
    warmup_steps: Optional[int] = _DEFAULT_WARMUP_STEPS
    warmup_ratio: Optional[float] = None
    max_steps: Optional[int] = None
    """The length that ``warmup_ratio`` is a fraction of. None: the trainer's ``max_steps``. The schedule doesn't end
    there."""
    min_lr: float = 0.0
    """The least rate after the warm-up."""

    def lr_at(self, step: int, max_lr: float) -> float:
        """``max_lr * d_model**-0.5 * min(step**-0.5, step * w**-1.5)``, step from 1."""
        warmup_end = self._warmup_end()
        step = max(1, step)
        shape = step**-0.5
        if warmup_end > 0:
            shape = min(shape, step * warmup_end**-1.5)
        rate = max_lr * self.d_model**-0.5 * shape
        return max(rate, self.min_lr) if step > warmup_end else rate


@configurable
@dataclass(eq=False)
class NoamHoldAnnealingScheduler(_PhasedSchedule):
    """Warm up, hold, then decay polynomially, with an explicit peak (Squeezeformer, arXiv 2206.00888).

    ``decay_rate`` 0.5 is Noam's decay, 1.0 the paper's. NeMo's class has no warm-up parameters, although its formula
    fails without a warm-up. Here they are added.
    """

    needs_max_steps: ClassVar[bool] = False

    max_steps: Optional[int] = None
    decay_rate: float = 0.5
    """The exponent of the decay."""
    min_lr: float = 0.0
    warmup_steps: Optional[int] = _DEFAULT_WARMUP_STEPS
    warmup_ratio: Optional[float] = None
    hold_steps: Optional[int] = None
    hold_ratio: Optional[float] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warmup_steps and not self.warmup_ratio:
            raise ConfigError(
                f"{type(self).__name__}.warmup_steps={self.warmup_steps}: the decay depends on the length of the "
                "warm-up. Set warmup_steps or warmup_ratio above 0."
            )

    def _formula(self, step: int, max_lr: float) -> float:
        """``max(min_lr, max_lr * (w / (step - hold))**decay_rate)`` after warm-up w and hold."""
        warmup_end, hold_end = self._warmup_end(), self._hold_end()
        held = hold_end - warmup_end if hold_end > 0 else 0
        peak_at = max(1.0, warmup_end**self.decay_rate)
        return max(self.min_lr, max_lr * peak_at / max(1.0, (step - held) ** self.decay_rate))


@configurable
@dataclass(eq=False)
class PolynomialDecayAnnealingScheduler(_PhasedSchedule):
    """Decay polynomially from ``max_lr`` to ``min_lr``.

    ``cycle`` extends the decay to the next multiple of ``max_steps``. It changes nothing within a run, because every
    schedule is at ``min_lr`` after ``max_steps``. It is accepted for NeMo's signature.
    """

    max_steps: Optional[int] = None
    min_lr: float = 0.0
    power: float = 1.0
    """The exponent of the decay. 1: linear."""
    cycle: bool = False
    """Accepted for NeMo's signature. True is reported as having no effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        warn_without_effect("The decay ends with the run, so there is nothing to extend.", cycle=(self.cycle, False))

    def _formula(self, step: int, max_lr: float) -> float:
        """``min_lr + (max_lr - min_lr) * (1 - t) ** power`` with t from 0 to 1 between the hold's end and the run's."""
        hold_end = self._hold_end()
        decayed = _share(step - hold_end, self._length() - hold_end)
        return self.min_lr + (max_lr - self.min_lr) * (1 - decayed) ** self.power


@configurable
@dataclass(eq=False)
class PolynomialHoldDecayAnnealingScheduler(PolynomialDecayAnnealingScheduler):
    """Decay polynomially after a hold at ``max_lr``. Without a hold this is the polynomial decay.

    NeMo's class has no hold parameters, so its hold is always empty. Here they are added.
    """

    hold_steps: Optional[int] = None
    hold_ratio: Optional[float] = None


def _trainer_steps(model: Any) -> Optional[int]:
    """The trainer's max_steps. None without a trainer, or for a run without a limit (-1)."""
    try:
        steps = model.trainer.max_steps
    except (AttributeError, RuntimeError):  # a LightningModule without a trainer raises RuntimeError
        return None
    return steps if steps is not None and steps > 0 else None


def _share(part: float, whole: float) -> float:
    """``part / whole``, clamped to 0..1. An empty decay counts as finished."""
    return min(1.0, part / whole) if whole > 0 else 1.0


def set_last_rates(schedule: Any) -> None:
    """Give the optimizer of a restored schedule its last rates, which schedules of torch's multiply.

    Args:
        schedule: A schedule of torch's, or another object, which has no rates.
    """
    if isinstance(schedule, LRScheduler):
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
