# SPDX-License-Identifier: Apache-2.0
"""Rules of overlapped communication."""

from collections.abc import Iterator

from nemo2.config.domains import out_of_range
from nemo2.config.walk import class_of
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

OVERLAP = Topic("Overlapped communication")


@OVERLAP.settled("gathered-parameters-are-sharded")
def _gathered_parameters_are_sharded() -> None:
    """`overlap_param_gather` requires the distributed optimizer.

    Otherwise: The strategy raises an error on every rank, because Megatron-Core would wait for gathers that never
    start.
    """


@OVERLAP.settled("gather-starts-from-reduction")
def _gather_starts_from_reduction() -> None:
    """`overlap_param_gather` requires `overlap_grad_reduce`.

    Otherwise: Megatron-Core puts all parameters into one bucket, and the first layer waits for all of them.
    """


@OVERLAP.settled("one-switch-for-the-gather")
def _one_switch_for_the_gather() -> None:
    """`overlap_param_gather` of the optimizer follows that of the gradient buffers. Set it on the buffers, or set both to
    the same value.

    Otherwise: The strategy raises an error on every rank, because nothing would overlap, and parameters that are gathered in
    MXFP8 would stay as they are.
    """


@OVERLAP.settled("one-switch-for-delayed-gradients")
def _one_switch_for_delayed_gradients() -> None:
    """`delay_wgrad_compute` of the gradient buffers follows that of the model. Set it on the model, or set both to the
    same value.

    Otherwise: The strategy raises an error on every rank, because the buffers would reduce gradients that aren't there yet.
    """


@OVERLAP.settled("gather-in-the-step-needs-virtual-stages")
def _gather_in_the_step_needs_virtual_stages() -> None:
    """`overlap_param_gather_with_optimizer_step` requires virtual stages, the distributed optimizer and `overlap_param_gather`.

    Otherwise: Megatron-Core ends in the first step on every rank, or nothing overlaps.
    """


@OVERLAP.rule("averages-are-of-losses-not-tokens")
def _average(facts: Facts) -> Iterator[str]:
    """`average_in_collective` cannot be used with `calculate_per_token_loss`.

    Otherwise: Megatron-Core raises an AssertionError when it wraps the model.
    """
    if facts.ddp is not None and facts.ddp.average_in_collective and facts.of_model("calculate_per_token_loss"):
        yield (
            "strategy.ddp_config.average_in_collective=True with model.config.calculate_per_token_loss=True: "
            "gradients must be summed first and then divided by the number of tokens on all ranks. Set "
            "strategy.ddp.average_in_collective=False."
        )


@OVERLAP.settled("fp32-sums-are-of-one-optimizers-shards")
def _fp32_sums_are_of_one_optimizers_shards() -> None:
    """`reduce_scatter_with_fp32_accumulation` requires the distributed optimizer, with one instance and without Megatron-FSDP.
    With virtual stages that share an embedding, it excludes `overlap_grad_reduce`.

    Otherwise: Megatron-Core raises an AssertionError, or does not sum in fp32, without an error.
    """


@OVERLAP.rule("tensor-overlap-needs-sequence-parallel")
def _tensor(facts: Facts) -> Iterator[str]:
    """`tp_comm_overlap` on the model requires tensor and sequence parallelism.

    Otherwise: Transformer Engine overlaps the gathers of sequence parallelism, and without it there are no gathers.
    """
    if not getattr(facts.model, "tp_comm_overlap", False):
        return
    layout = facts.layout
    if layout.tp == 1 or not layout.sp:
        yield (
            f"model.config.tp_comm_overlap=True with strategy.tensor_model_parallel_size={layout.tp} and "
            f"sequence_parallel={layout.sp}: tp_comm_overlap requires tensor and sequence parallelism. Set "
            "strategy.sequence_parallel=True (and a tensor-parallel size of 2 or more), or set tp_comm_overlap=False."
        )


@OVERLAP.settled("userbuffers-carry-the-format")
def _userbuffers_carry_the_format() -> None:
    """With `tp_comm_overlap`, Transformer Engine must support userbuffers for the tensor format. Delayed and
    current scaling are supported. MXFP8 is supported from version 2.4 on, with a multiple of 128 tokens. Blockwise
    scaling and NVFP4 are not supported.

    Otherwise: Transformer Engine raises an error in the first step on every rank.
    """


@OVERLAP.settled("userbuffers-have-one-size")
def _userbuffers_have_one_size() -> None:
    """With `tp_comm_overlap`, every micro-batch must have the same number of tokens.

    Otherwise: The run rejects the batch, because Transformer Engine would copy more or less than the buffers hold.
    """


@OVERLAP.settled("every-projection-has-a-userbuffer")
def _every_projection_has_a_userbuffer() -> None:
    """With `tp_comm_overlap` on the model, Transformer Engine must have buffers for all projections. It has none
    for multi-latent attention, for multi-token prediction and for layers that replace others.

    Otherwise: Megatron-Core turns the overlap off for the whole model, or Transformer Engine finds no buffer in the
    first step.
    """


@OVERLAP.rule("buckets-have-elements")
def _buckets(facts: Facts) -> Iterator[str]:
    """`bucket_size` must be at least 1, or None, and the sharding strategies must be Megatron-FSDP's.

    Otherwise: Megatron-Core would not put any parameter into a bucket, or would shard nothing.
    """
    yield from out_of_range(facts.ddp, "strategy.ddp_config", domains.BUFFERS, others=False)


@OVERLAP.rule("overlap-arguments-are-in-range")
def _arguments(facts: Facts) -> Iterator[str]:
    """The arguments of the overlap callback must be valid values of the fields that they set.

    Otherwise: With `bucket_size=-1`, Megatron-Core sends each parameter in its own collective.
    """
    for path, callback in facts.callbacks:
        if getattr(class_of(callback), "asks_for_overlap", False):
            yield from out_of_range(callback, path, domains.OVERLAP, others=False)


@OVERLAP.settled("overlap-is-asked-for-once")
def _overlap_is_requested_once() -> None:
    """The overlap callback must not contradict the settings of the model, the optimizer and the gradient buffers.

    Otherwise: The callback raises an error on every rank.
    """
