# SPDX-License-Identifier: Apache-2.0
"""Rules about the length of a run, and the intervals of validation, logging and saving."""

import re
from collections.abc import Iterator

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


@CADENCE.rule("validation-interval-is-a-count")
def _interval(facts: Facts) -> Iterator[str]:
    """`val_check_interval` must be at least 1 step, or a fraction of an epoch above 0 and at most 1.0.
    `check_val_every_n_epoch` must be at least 1.

    Otherwise: The first step raises ZeroDivisionError, or Lightning raises an error on every rank.
    """
    trainer = facts.trainer
    interval, limit = getattr(trainer, "val_check_interval", None), getattr(trainer, "limit_val_batches", None)
    epochs = getattr(trainer, "check_val_every_n_epoch", None)
    if isinstance(epochs, int) and epochs < 1 and limit != 0:
        yield (
            f"trainer.check_val_every_n_epoch={epochs}: must be at least 1 epoch. Set a number of epochs, or set "
            "trainer.limit_val_batches=0 to skip validation."
        )
    if isinstance(interval, bool) or not isinstance(interval, int | float) or limit == 0:
        return
    if isinstance(interval, int) and interval < 1:
        yield (
            f"trainer.val_check_interval={interval}: must be at least 1 step. Set a number of steps, or set "
            "trainer.limit_val_batches=0 to skip validation."
        )
    elif isinstance(interval, float) and not 0 < interval <= 1:
        yield (
            f"trainer.val_check_interval={interval}: a fraction of an epoch must be above 0 and at most 1.0. Set such "
            "a fraction, or a whole number of steps."
        )


@CADENCE.rule("times-count-from-days-to-seconds")
def _times(facts: Facts) -> Iterator[str]:
    """`max_time`, and a `val_check_interval` that is a time, must have the form DD:HH:MM:SS.

    Otherwise: Lightning raises an error on every rank.
    """
    for name in ("max_time", "val_check_interval"):
        time = getattr(facts.trainer, name, None)
        if isinstance(time, str) and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", time.strip()):
            yield (
                f"trainer.{name}={time!r}: a time must have the form DD:HH:MM:SS, with days, hours, minutes and seconds. "
                f"For example, set trainer.{name}=00:04:00:00 for 4 hours."
            )


@CADENCE.rule("limits-are-counts-or-shares")
def _limits(facts: Facts) -> Iterator[str]:
    """Each `limit_..._batches` must be a whole number of at least 0, or a fraction between 0 and 1.

    Otherwise: Lightning raises an error on every rank.
    """
    for split in ("train", "val", "test", "predict"):
        value = getattr(facts.trainer, f"limit_{split}_batches", None)
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < 0 or (value > 1 and value % 1):
            yield (
                f"trainer.limit_{split}_batches={value}: must be a whole number of at least 0, or a fraction between 0 "
                "and 1."
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
