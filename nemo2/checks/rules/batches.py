# SPDX-License-Identifier: Apache-2.0
"""Batches over replicas, micro-batches over stages, and sequences that two settings agree on."""

from collections.abc import Iterator

from nemo2.checks import domains
from nemo2.checks.arithmetic import is_count, nearest
from nemo2.checks.domains import out_of_range
from nemo2.checks.facts import Facts
from nemo2.checks.rule import Topic
from nemo2.checks.rules.pipeline import VP
from nemo2.checks.rules.world import CP, PP

BATCHES = Topic("Batches and sequences")
GROUP = "strategy.microbatch_group_size_per_vp_stage"


@BATCHES.rule(
    "batches-are-counts",
    says="Batch sizes and sequence length are whole numbers of at least 1.",
    otherwise="Megatron-Core's index builder divides by the sequence length and takes the process down.",
    broken="data.micro_batch_size=0",
    mended="data.micro_batch_size=1",
)
def _counts(facts: Facts) -> Iterator[str]:
    yield from out_of_range(facts.data, "data", domains.BATCH, others=False)


@BATCHES.rule(
    "batch-over-replicas",
    says="Micro-batch size * data-parallel size divides the global batch size.",
    otherwise="Megatron-Core refuses to count micro-batches.",
    broken="data.global_batch_size=510 data.micro_batch_size=2",
    mended="data.global_batch_size=512 data.micro_batch_size=2",
    megatron_refuses=True,
)
def _global_batch(facts: Facts) -> Iterator[str]:
    gbs, mbs, dp = facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    if gbs and mbs and dp and gbs > 0 and mbs > 0 and gbs % (mbs * dp):
        yield (
            f"data.global_batch_size={gbs} is not a multiple of data.micro_batch_size * data-parallel size = {mbs} * {dp} = "
            f"{mbs * dp}; nearest: {nearest(gbs, mbs * dp)}."
        )


@BATCHES.rule(
    "ramp-up-over-replicas",
    says="Every batch size on the way of `rampup_batch_size` is a multiple of micro-batch size * data-parallel size.",
    otherwise="The run stops at the first step of another size.",
    broken="data.rampup_batch_size=[30,2,1000]",
    mended="data.rampup_batch_size=[32,16,1000]",
)
def _ramp_up(facts: Facts) -> Iterator[str]:
    ramp, dp, mbs = getattr(facts.data, "rampup_batch_size", None), facts.data_parallel_size, facts.micro_batch_size
    if (
        not isinstance(ramp, list | tuple)
        or len(ramp) != 3
        or not all(map(is_count, ramp))
        or not dp
        or not is_count(mbs)
    ):
        return  # the sampler itself says what is wrong with the numbers
    assert mbs is not None
    unit = mbs * dp
    for name, value in (("start", ramp[0]), ("increment", ramp[1])):
        if value % unit:
            yield (
                f"data.rampup_batch_size={list(ramp)}: its {name} {value} is not a multiple of data.micro_batch_size * "
                f"data-parallel size = {mbs} * {dp} = {unit}; nearest: {nearest(value, unit)}."
            )


@BATCHES.rule(
    "micro-batches-in-groups",
    says="Interleaved stages run micro-batches in groups, of at least as many as there are stages, and so is what the last group "
    "has.",
    otherwise="Megatron-Core raises in the first step.",
    broken=f"{PP}=4 {VP}=2 {CP}=1 data.global_batch_size=12",
    mended=f"{PP}=4 {VP}=2 {CP}=1 data.global_batch_size=16",
)
def _groups(facts: Facts) -> Iterator[str]:
    layout, count = facts.layout, facts.num_microbatches
    if layout.pp == 1 or not layout.vp or layout.vp == 1 or not count:
        return
    gbs, mbs, dp = facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    assert gbs is not None and mbs is not None and dp is not None
    group = _group(facts)
    # Megatron-Core's forward_backward_pipelining_with_interleaving: range of the group, and of what is left over.
    if group >= layout.pp and (count < group or 0 < count % group < layout.pp):
        yield (
            f"The interleaved schedule runs micro-batches in groups of {group}, and there are {count} per step "
            f"(data.global_batch_size={gbs} / ({mbs} * {dp})); nearest global batch sizes: {nearest(gbs, mbs * dp * group)}."
        )


@BATCHES.rule(
    "groups-fill-the-stages",
    says="A group of micro-batches (`microbatch_group_size_per_vp_stage`) is at least the pipeline size.",
    otherwise="Megatron-Core raises in the first step.",
    broken=f"{PP}=4 {VP}=2 {GROUP}=2",
    mended=f"{PP}=4 {VP}=2 {GROUP}=4",
)
def _group_size(facts: Facts) -> Iterator[str]:
    layout, group = facts.layout, _group(facts)
    if layout.pp > 1 and layout.vp and layout.vp > 1 and group < layout.pp:
        yield (
            f"{GROUP}={group} is less than strategy.pipeline_model_parallel_size={layout.pp}: use {layout.pp} or more, or "
            "unset it."
        )


@BATCHES.rule(
    "one-sequence-length",
    says="The sequence length is written on the data; the model follows.",
    otherwise="Positions, FLOPs and buffers would be of another length than the samples.",
    broken="model.config.seq_length=4096",
    mended="data.seq_length=4096",
)
def _one_length(facts: Facts) -> Iterator[str]:
    model, data = getattr(facts.model, "__arguments__", {}).get("seq_length"), facts.seq_length
    if model and data and model != data:
        yield (
            f"model.config.seq_length={model} contradicts data.seq_length={data}: set it on the data only, and the model follows."
        )


@BATCHES.rule(
    "accumulation-is-micro-batches",
    says="`accumulate_grad_batches` stays 1.",
    otherwise="It would count one batch several times: micro-batches are the accumulation.",
    broken="trainer.accumulate_grad_batches=4",
    mended="data.global_batch_size=2048",
)
def _accumulation(facts: Facts) -> Iterator[str]:
    batches = getattr(facts.trainer, "accumulate_grad_batches", None)
    if facts.sizes and isinstance(batches, int) and batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={batches}: a step runs data.global_batch_size / (data.micro_batch_size * "
            "data-parallel size) micro-batches already. Set it to 1, and change data.global_batch_size."
        )


@BATCHES.rule(
    "samples-for-every-step",
    says="`num_train_samples`, where it is set on files, is enough for `max_steps`.",
    otherwise="The data module refuses on the ranks.",
    recipe="llama_tiny",
    broken="",
    mended="",
    corpus=(
        {
            "paths": "corpus",
            "seq_length": 128,
            "micro_batch_size": 8,
            "global_batch_size": 16,
            "num_train_samples": 100,
        },
        {
            "paths": "corpus",
            "seq_length": 128,
            "micro_batch_size": 8,
            "global_batch_size": 16,
            "num_train_samples": 4800,
        },
    ),
)
def _samples(facts: Facts) -> Iterator[str]:
    samples, steps, gbs = (
        getattr(facts.data, "num_train_samples", None),
        getattr(facts.trainer, "max_steps", None),
        facts.global_batch_size,
    )
    if not hasattr(facts.data, "paths") or not (is_count(samples) and is_count(steps) and is_count(gbs)):
        return
    if samples < steps * gbs:
        yield (
            f"data.num_train_samples={samples} is less than trainer.max_steps={steps} * data.global_batch_size={gbs} = "
            f"{steps * gbs}: raise it to that, or leave it None."
        )


@BATCHES.rule(
    "samples-for-a-step",
    says="Mock data has the samples of one global batch, for training and, where the trainer validates, for validation.",
    otherwise="The sampler refuses on the ranks.",
    broken="data.num_train_samples=100",
    mended="data.num_train_samples=512",
)
def _step(facts: Facts) -> Iterator[str]:
    gbs, data = facts.global_batch_size, facts.data
    if hasattr(data, "paths") or not is_count(gbs):
        return
    validates = getattr(facts.trainer, "limit_val_batches", None) != 0 and getattr(data, "val_drop_last", True)
    for name in ("num_train_samples", "num_val_samples")[: 1 + validates]:
        samples = getattr(data, name, None)
        if is_count(samples) and samples < gbs:
            yield f"data.{name}={samples} is less than data.global_batch_size={gbs}: raise it to that or more."


def _group(facts: Facts) -> int:
    size = facts.of_strategy("microbatch_group_size_per_vp_stage")
    return size if isinstance(size, int) else facts.layout.pp
