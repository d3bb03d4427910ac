# SPDX-License-Identifier: Apache-2.0
"""Rules about the length of a run, and the intervals of validation, logging and saving."""

from collections.abc import Iterator

from nemo2.base.counts import is_count
from nemo2.config.walk import class_of
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.domains import out_of_range
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

CADENCE = Topic("Steps, validation, checkpoints", needs_sizes=False)


@CADENCE.rule("steps-are-counts")
def _steps(facts: Facts) -> Iterator[str]:
    """`max_steps` must be at least 1, or -1 for no limit on steps. `log_every_n_steps` must be at least 1, or 0 to log
    nothing.

    Otherwise: Lightning raises an error on every rank, or the run ends before its first step.
    """
    yield from out_of_range(facts.trainer, "trainer", domains.TRAINER, others=False)


@CADENCE.rule("training-has-steps")
def _some_steps(facts: Facts) -> Iterator[str]:
    """In a run that trains, `max_epochs`, `limit_train_batches` and `max_time` must leave time for a step, and `max_steps` and
    `max_epochs` for the least number of steps and epochs (`min_steps`, `min_epochs`).

    Otherwise: The run ends before its first step or before its least number of steps, as if it had succeeded.
    """
    from nemo2.preflight.checks.lightning import no_time

    trainer = facts.trainer
    if not facts.trains:
        return
    for name in ("max_epochs", "limit_train_batches"):
        if (value := getattr(trainer, name, None)) is not None and value == 0:
            yield f"trainer.{name}={value!r}: with 0, nothing is trained. Set it to 1 or more, or to None for no limit."
    if no_time(value := getattr(trainer, "max_time", None)):
        yield f"trainer.max_time={value}: leaves no time for a step. Set a longer time, or None for no limit."
    for unit in ("steps", "epochs"):
        least, most = (getattr(trainer, f"{end}_{unit}", None) for end in ("min", "max"))
        if is_count(least) and is_count(most) and least > most:
            yield (
                f"trainer.min_{unit}={least} is more than trainer.max_{unit}={most}, which ends the run. Set max_{unit} to "
                f"{least} or more, or min_{unit} to {most} or less."
            )


@CADENCE.rule("early-stopping-has-a-validation")
def _early_stopping(facts: Facts) -> Iterator[str]:
    """EarlyStopping looks at its metric after validations, so a run with it must validate, or look at a metric of training at
    the end of an epoch (`check_on_train_epoch_end`).

    Otherwise: The run never stops early, or ends in an error after its first epoch.
    """
    from lightning.pytorch.callbacks import EarlyStopping

    trainer, data = facts.trainer, facts.parts.get("data")
    none = (
        "trainer.limit_val_batches=0."
        if getattr(trainer, "limit_val_batches", None) == 0
        else data.no_samples("validation")
        if hasattr(data, "no_samples")
        else None
    )
    if none is None or not facts.trains:
        return
    # Lightning's choice where the callback makes none.
    by_epoch = [getattr(trainer, name, None) in (None, 1) for name in ("val_check_interval", "check_val_every_n_epoch")]
    for path, callback in facts.callbacks:
        cls, monitor = class_of(callback), str(getattr(callback, "monitor", ""))
        if not (isinstance(cls, type) and issubclass(cls, EarlyStopping)):
            continue
        chosen = getattr(callback, "check_on_train_epoch_end", getattr(callback, "_check_on_train_epoch_end", None))
        if not (all(by_epoch) if chosen is None else chosen) or monitor.startswith("val"):
            yield (
                f"{path}.monitor={monitor!r}: the run never validates, and so never stops early. {none} Let it validate, or "
                "remove the callback."
            )


@CADENCE.rule("validation-interval-is-a-count")
def _interval(facts: Facts) -> Iterator[str]:
    """With validation, `val_check_interval` must not be 0, and `check_val_every_n_epoch` must be at least 1.

    Otherwise: The first step raises ZeroDivisionError.
    """
    trainer = facts.trainer
    for name in ("val_check_interval", "check_val_every_n_epoch"):
        value, one = getattr(trainer, name, None), "1 step" if name == "val_check_interval" else "1 epoch"
        wrong = isinstance(value, int) and (value == 0 or (value < 0 and one == "1 epoch"))
        if wrong and getattr(trainer, "limit_val_batches", None) != 0:
            yield (
                f"trainer.{name}={value}: must be at least {one}. Set a number of {one[2:]}s, or set "
                "trainer.limit_val_batches=0 to skip validation."
            )


@CADENCE.rule("intervals-within-an-epoch-fit-it")
def _within_epoch(facts: Facts) -> Iterator[str]:
    """If `check_val_every_n_epoch` is set, `val_check_interval` must be at most `limit_train_batches`.

    Otherwise: Lightning raises an error when training starts.
    """
    trainer = facts.trainer
    epochs, interval = getattr(trainer, "check_val_every_n_epoch", None), getattr(trainer, "val_check_interval", None)
    batches, limit = getattr(trainer, "limit_train_batches", None), getattr(trainer, "limit_val_batches", None)
    if epochs is None or not isinstance(interval, int) or not isinstance(batches, int) or limit == 0:
        return
    if interval > batches:
        yield (
            f"trainer.val_check_interval={interval} is more than trainer.limit_train_batches={batches}, and "
            f"trainer.check_val_every_n_epoch={epochs} counts the interval within an epoch. Set val_check_interval to "
            f"{batches} or less, or set check_val_every_n_epoch=None to count over the whole run."
        )
