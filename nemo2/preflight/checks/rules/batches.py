# SPDX-License-Identifier: Apache-2.0
"""Rules about batches, micro-batches and sequence lengths."""

from collections.abc import Iterator
from typing import Any

from nemo2.base.counts import is_count
from nemo2.data.batch_size import BatchSizeSchedule
from nemo2.errors import ConfigError
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.arithmetic import nearest
from nemo2.preflight.checks.domains import out_of_range
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

BATCHES = Topic("Batches and sequences")
GROUP = "strategy.microbatch_group_size_per_vp_stage"


@BATCHES.rule("batches-are-counts")
def _counts(facts: Facts) -> Iterator[str]:
    """Batch sizes and the sequence length must be whole numbers of at least 1.

    Otherwise: Megatron-Core's index builder divides by the sequence length and crashes the process.
    """
    yield from out_of_range(facts.data, "data", domains.BATCH, others=False)


@BATCHES.rule("batch-over-replicas", megatron_refuses=True)
def _global_batch(facts: Facts) -> Iterator[str]:
    """Micro-batch size * data-parallel size must divide the global batch size.

    Otherwise: Megatron-Core cannot compute the number of micro-batches and raises an error.
    """
    yield from _unsplit(facts, None)


@BATCHES.rule("ramp-up-over-replicas")
def _ramp_up(facts: Facts) -> Iterator[str]:
    """Every batch size of the ramp-up (`rampup_batch_size`) must be a multiple of micro-batch size * data-parallel
    size.

    Otherwise: The run stops at the first step with a batch size that is not a multiple.
    """
    yield from _unsplit(facts, facts.at("data.rampup_batch_size"))


@BATCHES.rule("micro-batches-in-groups")
def _groups(facts: Facts) -> Iterator[str]:
    """The interleaved schedule runs micro-batches in groups. Every group, including the last one, must have at
    least as many micro-batches as there are pipeline stages.

    Otherwise: Megatron-Core raises an error in the first step.
    """
    layout, count = facts.layout, facts.num_microbatches
    if layout.pp == 1 or not layout.vp or layout.vp == 1 or not count:
        return
    gbs, mbs, dp = facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    assert gbs is not None and mbs is not None and dp is not None
    group = _group(facts)
    # See Megatron-Core's forward_backward_pipelining_with_interleaving: the valid sizes of a group and of the last
    # group.
    if group >= layout.pp and (count < group or 0 < count % group < layout.pp):
        yield (
            f"data.global_batch_size={gbs} gives {gbs} / ({mbs} * {dp}) = {count} micro-batches per step, but the "
            f"interleaved schedule runs micro-batches in groups of {group}. Set data.global_batch_size to a multiple "
            f"of {mbs * dp * group}; nearest: {nearest(gbs, mbs * dp * group)}."
        )


@BATCHES.rule("groups-fill-the-stages")
def _group_size(facts: Facts) -> Iterator[str]:
    """A group of micro-batches (`microbatch_group_size_per_vp_stage`) must be at least as large as the
    pipeline-parallel size.

    Otherwise: Megatron-Core raises an error in the first step.
    """
    layout, group = facts.layout, _group(facts)
    if layout.pp > 1 and layout.vp and layout.vp > 1 and group < layout.pp:
        yield (
            f"{GROUP}={group} is less than strategy.pipeline_model_parallel_size={layout.pp}. Set it to {layout.pp} "
            "or more, or leave it unset."
        )


@BATCHES.rule("one-sequence-length")
def _one_length(facts: Facts) -> Iterator[str]:
    """The sequence length must be set on the data module. The model takes it from there.

    Otherwise: Positions, FLOPs and buffers are computed for a sequence length that the samples do not have.
    """
    model, data = getattr(facts.model, "__arguments__", {}).get("seq_length"), facts.seq_length
    if model and data and model != data:
        yield (
            f"model.config.seq_length={model} contradicts data.seq_length={data}. Remove model.config.seq_length: the "
            "model takes the sequence length from the data."
        )


@BATCHES.rule("accumulation-is-micro-batches")
def _accumulation(facts: Facts) -> Iterator[str]:
    """`accumulate_grad_batches` must stay 1.

    Otherwise: Lightning counts one batch several times, because the micro-batches of a step already accumulate
    gradients.
    """
    batches = facts.at("trainer.accumulate_grad_batches")
    if facts.sizes and isinstance(batches, int) and batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={batches}: a step already accumulates gradients over "
            "data.global_batch_size / (data.micro_batch_size * data-parallel size) micro-batches. Set "
            "accumulate_grad_batches=1, and change data.global_batch_size instead."
        )


@BATCHES.rule("samples-for-every-step")
def _samples(facts: Facts) -> Iterator[str]:
    """With a data module that reads files, `num_train_samples` must be None or enough for `max_steps`.

    Otherwise: The data module raises an error on every rank.
    """
    samples, steps, gbs = (
        facts.at("data.num_train_samples"),
        facts.at("trainer.max_steps"),
        facts.global_batch_size,
    )
    if not hasattr(facts.data, "paths") or not (is_count(samples) and is_count(steps) and is_count(gbs)):
        return
    if samples < steps * gbs:
        yield (
            f"data.num_train_samples={samples} is less than trainer.max_steps * data.global_batch_size = {steps} * "
            f"{gbs} = {steps * gbs}. Set it to {steps * gbs} or more, or to None."
        )


@BATCHES.rule("samples-for-a-step")
def _step(facts: Facts) -> Iterator[str]:
    """Mock data must have enough samples for one global batch, for training and, if the trainer validates, for
    validation.

    Otherwise: The sampler raises an error on every rank.
    """
    gbs, data = facts.global_batch_size, facts.data
    if hasattr(data, "paths") or not is_count(gbs):
        return
    for name in ("num_train_samples", "num_val_samples")[: 1 + facts.validates]:
        samples = getattr(data, name, None)
        if is_count(samples) and samples < gbs:
            yield f"data.{name}={samples} is less than data.global_batch_size={gbs}. Set it to {gbs} or more."


def _unsplit(facts: Facts, rampup: Any) -> Iterator[str]:
    """A message if the run's replicas can't split a batch into whole micro-batches."""
    gbs, mbs, dp = facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    if not (is_count(gbs) and is_count(mbs) and dp):
        return
    try:
        schedule = BatchSizeSchedule(gbs, rampup)
    except (ConfigError, TypeError):
        return  # the data module reports invalid numbers
    try:
        schedule.check(mbs, dp)
    except ConfigError as error:
        yield f"data.{error}"


def _group(facts: Facts) -> int:
    size = facts.of_strategy("microbatch_group_size_per_vp_stage")
    return size if isinstance(size, int) else facts.layout.pp
