# SPDX-License-Identifier: Apache-2.0
"""Rules about the length of a run, and the intervals of validation, logging and saving."""

import math
from collections.abc import Iterator
from datetime import timedelta

from nemo2.base.counts import is_count
from nemo2.base.names import shortened
from nemo2.config.domains import out_of_range
from nemo2.config.walk import class_of
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

CADENCE = Topic("Steps, validation, checkpoints", needs_sizes=False)


@CADENCE.rule("steps-are-counts")
def _steps(facts: Facts) -> Iterator[str]:
    """`max_steps` and `max_epochs` must be at least 1, or -1 for no limit. `log_every_n_steps` must be at least 1, or 0 to log
    nothing. `min_steps`, `min_epochs` and `num_sanity_val_steps` must be whole numbers.

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
    least, epochs = getattr(trainer, "min_steps", None), getattr(trainer, "max_epochs", None)
    for length, name in _batches_of_an_epoch(facts):
        if is_count(least) and is_count(epochs) and least > length * epochs:
            yield (
                f"trainer.min_steps={least} is more than trainer.max_epochs={epochs} times {name}, which ends the run. Raise "
                f"max_epochs, or set min_steps to {length * epochs} or less."
            )


@CADENCE.rule("early-stopping-has-a-validation")
def _early_stopping(facts: Facts) -> Iterator[str]:
    """EarlyStopping looks at its metric after validations, so a run with it must validate, or look at a metric of training at
    the end of an epoch (`check_on_train_epoch_end`).

    Otherwise: The run never stops early, or ends in an error after its first epoch.
    """
    from lightning.pytorch.callbacks import EarlyStopping

    trainer, data = facts.trainer, facts.parts.get("data")
    reason = None
    if getattr(trainer, "limit_val_batches", None) == 0:
        reason = "trainer.limit_val_batches=0."
    elif hasattr(data, "no_samples"):
        reason = data.no_samples("validation")
    if reason is None or not facts.trains:
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
                f"{path}.monitor={monitor!r}: the run never validates, and so never stops early. {reason} Let it validate, or "
                "remove the callback."
            )


@CADENCE.rule("validation-interval-is-a-count")
def _interval(facts: Facts) -> Iterator[str]:
    """With validation, `val_check_interval` must be a number of steps, a fraction of an epoch up to 1, or a time, and above 0.
    `check_val_every_n_epoch` must be at least 1.

    Otherwise: The first step raises ZeroDivisionError, or the run validates after every step. A number of steps with a decimal
    point counts within an epoch.
    """
    from nemo2.preflight.checks.lightning import no_time

    trainer = facts.trainer
    if getattr(trainer, "limit_val_batches", None) == 0:
        return
    interval, epochs = (getattr(trainer, name, None) for name in ("val_check_interval", "check_val_every_n_epoch"))
    skip = "or set trainer.limit_val_batches=0 to skip validation"
    if isinstance(interval, float) and 1 < interval < math.inf:
        yield (
            f"trainer.val_check_interval={interval}: a number with a decimal point is a fraction of an epoch, at most 1.0. Set "
            f"{shortened(str(int(interval)))} for a number of steps."
        )
    elif no_time(interval) if isinstance(interval, str | dict | timedelta) else interval == 0:
        yield f"trainer.val_check_interval={interval}: must be at least 1 step. Set a number of steps, {skip}."
    if isinstance(epochs, int) and epochs < 1:
        yield f"trainer.check_val_every_n_epoch={epochs}: must be at least 1 epoch. Set a number of epochs, {skip}."


@CADENCE.rule("intervals-within-an-epoch-fit-it")
def _within_epoch(facts: Facts) -> Iterator[str]:
    """If `check_val_every_n_epoch` is set, `val_check_interval` must be at most `limit_train_batches`, and at most the batches
    of an epoch.

    Otherwise: Lightning raises an error when training starts.
    """
    trainer = facts.trainer
    epochs, interval = getattr(trainer, "check_val_every_n_epoch", None), getattr(trainer, "val_check_interval", None)
    limit = getattr(trainer, "limit_val_batches", None)
    if epochs is None or not isinstance(interval, int) or limit == 0 or not facts.trains:
        return
    for length, name in _batches_of_an_epoch(facts):
        if interval > length:
            yield (
                f"trainer.val_check_interval={interval} is more than {name}, and "
                f"trainer.check_val_every_n_epoch={epochs} counts the interval within an epoch. Set val_check_interval to "
                f"{length} or less, or set check_val_every_n_epoch=None to count over the whole run."
            )


def _batches_of_an_epoch(facts: Facts) -> list[tuple[int, str]]:
    """The number of batches of an epoch and what it comes from, in words. Empty: only the data tells."""
    batches, samples = (
        getattr(facts.trainer, "limit_train_batches", None),
        getattr(facts.data, "num_train_samples", None),
    )
    size = facts.global_batch_size
    lengths = [(batches, f"trainer.limit_train_batches={batches}")] if is_count(batches) else []
    if is_count(samples) and is_count(size) and samples >= size and facts.at("data.rampup_batch_size") is None:
        lengths.append((samples // size, f"the {samples // size} batches of data.num_train_samples={samples}"))
    return sorted(lengths)[:1]


@CADENCE.rule("overfitting-has-one-number-of-batches")
def _overfitting(facts: Facts) -> Iterator[str]:
    """`overfit_batches` must be a number of batches, or a fraction of the data up to 1. `limit_train_batches`, in whose place it
    stands, must be unset.

    Otherwise: A number of batches with a decimal point limits nothing, or ends the run, and `limit_train_batches` has no effect.
    """
    overfit, limit = (getattr(facts.trainer, name, None) for name in ("overfit_batches", "limit_train_batches"))
    if not overfit or not facts.trains:
        return
    if isinstance(overfit, float) and 1 < overfit < math.inf:
        yield (
            f"trainer.overfit_batches={overfit}: a number with a decimal point is a fraction of the data, at most 1.0. Set "
            f"{shortened(str(int(overfit)))} for a number of batches."
        )
    if limit is not None:
        yield (
            f"trainer.overfit_batches={overfit} and trainer.limit_train_batches={limit} both limit the batches of an epoch. "
            "Remove one of them."
        )


@CADENCE.rule("checkpoints-have-one-switch")
def _switch(facts: Facts) -> Iterator[str]:
    """Without checkpoints (`enable_checkpointing=False`), `log.ckpt` must be None.

    Otherwise: The run saves checkpoints all the same.
    """
    if facts.trains and facts.at("trainer.enable_checkpointing") is False and facts.at("log.ckpt") is not None:
        yield (
            "trainer.enable_checkpointing=False, but log.ckpt saves checkpoints. Set log.ckpt=None, or leave "
            "trainer.enable_checkpointing unset."
        )


@CADENCE.rule("checkpoints-have-names-of-their-own")
def _names(facts: Facts) -> Iterator[str]:
    """A `filename` of checkpoints without `{step}` or `{consumed_samples}` requires one validation per epoch at most, or
    `save_on_train_epoch_end`.

    Otherwise: The checkpoint of each validation replaces that of the one before it in the same epoch, the best one too.
    """
    interval, limit = (getattr(facts.trainer, name, None) for name in ("val_check_interval", "limit_val_batches"))
    once = interval is None or (isinstance(interval, float) and interval == 1)
    lengths = [length for length, _ in _batches_of_an_epoch(facts)]
    if once or limit == 0 or not facts.trains or (is_count(interval) and lengths and interval >= lengths[0]):
        return
    for path, node in (("log.ckpt", facts.at("log.ckpt")), *facts.callbacks):
        template = getattr(node, "filename", None)
        if not isinstance(template, str) or getattr(node, "save_on_train_epoch_end", None):
            continue
        if "{epoch" in template and "{step" not in template and "{consumed_samples" not in template:
            yield (
                f"{path}.filename={template!r}: trainer.val_check_interval={interval} validates several times per epoch, and "
                f"each validation saves a checkpoint. Set {template + '-{step}'!r}, or save_on_train_epoch_end=True."
            )
