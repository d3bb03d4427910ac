# SPDX-License-Identifier: Apache-2.0
"""Rules about batches, micro-batches and sequence lengths."""

import math
from collections.abc import Iterator

from nemo2.base.counts import counted, is_count
from nemo2.base.errors import ConfigError
from nemo2.data.batch_size import BatchSizeSchedule
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

BATCHES = Topic("Batches and sequences")


@BATCHES.rule("batch-over-replicas", megatron_refuses=True)
def _replicas(facts: Facts) -> Iterator[str]:
    """Micro-batch size * data-parallel size must divide the global batch size, and every batch size of a ramp-up
    (`rampup_batch_size`).

    Otherwise: Megatron-Core cannot compute the number of micro-batches and raises an error, in a ramp-up at the first
    step with such a batch size.
    """
    gbs, mbs, dp = facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    if not (is_count(gbs) and is_count(mbs) and dp):
        return
    try:
        schedule = BatchSizeSchedule(gbs, facts.at("data.rampup_batch_size"))
    except (ConfigError, TypeError):
        return  # the data module reports invalid numbers
    try:
        schedule.check(mbs, dp)
    except ConfigError as error:
        yield f"data.{error}"


@BATCHES.rule("micro-batches-in-groups")
def _groups(facts: Facts) -> Iterator[str]:
    """The interleaved schedule runs micro-batches in groups (`microbatch_group_size_per_vp_stage`). Every group,
    including the last one, must have at least as many micro-batches as there are pipeline stages.

    Otherwise: Megatron-Core raises an error in the first step.
    """
    layout, count, gbs = facts.layout, facts.num_microbatches, facts.global_batch_size
    if not count or not gbs:
        return
    if problem := layout.interleaving_problem(count, facts.of_strategy("microbatch_group_size_per_vp_stage")):
        samples = counted(gbs // count, "sample")
        yield f"{problem} data.global_batch_size={gbs} gives {count} micro-batches of {samples} per step."


@BATCHES.settled("one-sequence-length")
def _one_length() -> None:
    """The sequence length must be set on the data module. The model takes it from there.

    Otherwise: Positions, FLOPs and buffers are computed for a sequence length that the samples do not have.
    """


@BATCHES.rule("samples-for-every-step")
def _samples(facts: Facts) -> Iterator[str]:
    """With a data module that reads files, `num_train_samples` must be None or enough for `max_steps`.

    Otherwise: The data module raises an error on every rank.
    """
    steps, problem = facts.at("trainer.max_steps"), getattr(facts.parts.get("data"), "train_samples_problem", None)
    if problem is not None and is_count(steps) and (message := problem(steps)):
        yield message


@BATCHES.rule("samples-for-a-step")
def _step(facts: Facts) -> Iterator[str]:
    """`num_train_samples` must be enough for one global batch and, if the trainer validates, `num_val_samples` too. So must the
    fraction of them to which the trainer limits an epoch or a validation.

    Otherwise: The sampler or Lightning raises an error on every rank.
    """
    gbs, data = facts.global_batch_size, facts.data
    if not is_count(gbs):
        return
    # Of data from files, the rule above judges the training samples of a run with max_steps.
    steps = hasattr(facts.parts.get("data"), "train_samples_problem") and is_count(facts.at("trainer.max_steps"))
    overfit = facts.at("trainer.overfit_batches")
    limits = (("num_train_samples", "limit_train_batches"), ("num_val_samples", "limit_val_batches"))
    for name, limit in limits[int(steps) : 1 + facts.validates]:
        samples, limit = getattr(data, name, None), "overfit_batches" if overfit else limit
        if not is_count(samples):
            continue
        batches, share = samples // gbs, facts.at(f"trainer.{limit}")
        if not batches:
            yield f"data.{name}={samples} is less than data.global_batch_size={gbs}. Set it to {gbs} or more."
        elif isinstance(share, float) and 0 < share * batches < 1:
            yield (
                f"trainer.{limit}={share}: this fraction of {counted(batches, 'batch', 'batches')} (data.{name}={samples}) is "
                f"less than one. Set a number of batches, or {math.ceil(1000 / batches) / 1000} or more."
            )
