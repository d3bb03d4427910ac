# SPDX-License-Identifier: Apache-2.0
"""Rules of overlapped communication."""

from collections.abc import Iterator

from nemo2.checks.facts import Facts
from nemo2.checks.rule import Topic
from nemo2.checks.rules.pipeline import VP
from nemo2.checks.rules.world import CP, PP, TP

OVERLAP = Topic("Overlapped communication")
_SP = "strategy.sequence_parallel=True"
_OVERLAPPED = f"model.config.tp_comm_overlap=True {TP}=2 {_SP}"


@OVERLAP.rule(
    "gathered-parameters-are-sharded",
    says="`overlap_param_gather` needs the distributed optimizer.",
    otherwise="Megatron-Core would wait for gathers that nobody starts; the strategy refuses on every rank.",
    broken="strategy.ddp.overlap_param_gather=True optim.config.use_distributed_optimizer=False",
    mended="strategy.ddp.overlap_param_gather=True optim.config.use_distributed_optimizer=True",
)
def _gather(facts: Facts) -> Iterator[str]:
    yield from facts.settled.refused("gathered-parameters-are-sharded")


@OVERLAP.rule(
    "gather-starts-from-reduction",
    says="`overlap_param_gather` needs `overlap_grad_reduce`.",
    otherwise="Megatron-Core starts the gathers from hooks that overlapped reduction installs: none would start.",
    broken="strategy.ddp.overlap_param_gather=True strategy.ddp.overlap_grad_reduce=False",
    mended="strategy.ddp.overlap_param_gather=True strategy.ddp.overlap_grad_reduce=True",
)
def _hooks(facts: Facts) -> Iterator[str]:
    strategy = facts.parts.get("trainer.strategy")
    if strategy is None or facts.ddp is None or facts.asks_for_overlap:
        return  # the callback turns the gather off, and says so
    ddp, explicit = facts.ddp, strategy.explicit_ddp_fields
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce and "overlap_param_gather" in explicit:
        yield (
            "strategy.ddp_config.overlap_param_gather=True with overlap_grad_reduce=False: Megatron-Core starts gathering "
            "from the hooks of overlapped reduction. Set strategy.ddp.overlap_grad_reduce=True, or overlap_param_gather=False."
        )


@OVERLAP.rule(
    "gather-in-the-step-needs-virtual-stages",
    says="`overlap_param_gather_with_optimizer_step` needs `overlap_param_gather` and virtual stages.",
    otherwise="The first chunk would be used before its parameters are there.",
    broken="optim.config.overlap_param_gather_with_optimizer_step=True",
    mended="optim.config.overlap_param_gather_with_optimizer_step=True "
    f"{PP}=4 {VP}=2 {CP}=1 strategy.ddp.overlap_param_gather=True strategy.ddp.overlap_grad_reduce=True",
)
def _step(facts: Facts) -> Iterator[str]:
    asked = facts.of_optimizer("overlap_param_gather_with_optimizer_step")
    interleaved = facts.layout.pp > 1 and facts.layout.vp is not None and facts.layout.vp > 1
    if asked and not interleaved:
        yield (
            "optim.config.overlap_param_gather_with_optimizer_step=True updates one chunk while the next one's parameters are "
            "gathered, and this layout has one chunk per rank: set it to False, or "
            "strategy.virtual_pipeline_model_parallel_size to 2 or more."
        )


@OVERLAP.rule(
    "averages-are-of-losses-not-tokens",
    says="`average_in_collective` is not combined with `calculate_per_token_loss`.",
    otherwise="Megatron-Core asserts when the model is wrapped.",
    broken="strategy.ddp.average_in_collective=True model.config.calculate_per_token_loss=True",
    mended="strategy.ddp.average_in_collective=False model.config.calculate_per_token_loss=True",
)
def _average(facts: Facts) -> Iterator[str]:
    if facts.ddp is not None and facts.ddp.average_in_collective and facts.of_model("calculate_per_token_loss"):
        yield (
            "strategy.ddp_config.average_in_collective=True with model.config.calculate_per_token_loss=True: gradients are "
            "summed and divided by the tokens of all ranks afterwards. Set strategy.ddp.average_in_collective=False."
        )


@OVERLAP.rule(
    "tensor-overlap-needs-sequence-parallel",
    says="`tp_comm_overlap`, set on the model, needs tensor and sequence parallelism.",
    otherwise="Transformer Engine overlaps the gathers of sequence parallelism, and there are none.",
    broken=f"model.config.tp_comm_overlap=True {TP}=2",
    mended=_OVERLAPPED,
)
def _tensor(facts: Facts) -> Iterator[str]:
    if not getattr(facts.model, "tp_comm_overlap", False):
        return
    layout = facts.layout
    if layout.tp == 1 or not layout.sp:
        yield (
            f"model.config.tp_comm_overlap=True with strategy.tensor_model_parallel_size={layout.tp} and "
            f"sequence_parallel={layout.sp}: there is nothing to overlap without both. Set strategy.sequence_parallel=True "
            "(and a tensor size of 2 or more), or tp_comm_overlap=False."
        )


@OVERLAP.rule(
    "userbuffers-carry-the-format",
    says="With `tp_comm_overlap` tensors have a format that the machine's Transformer Engine exchanges through userbuffers: "
    "delayed and current scaling; MXFP8 from 2.4 on, in multiples of 128 tokens; neither blockwise scaling nor NVFP4.",
    otherwise="Transformer Engine refuses in the first step, on every rank.",
    broken=f"{_OVERLAPPED} trainer.plugins.fp8=hybrid trainer.plugins.fp8_recipe=blockwise",
    mended=f"{_OVERLAPPED} trainer.plugins.fp8=hybrid trainer.plugins.fp8_recipe=tensorwise",
)
def _format(facts: Facts) -> Iterator[str]:
    yield from facts.settled.refused("userbuffers-carry-the-format")


@OVERLAP.rule(
    "userbuffers-have-one-size",
    says="With `tp_comm_overlap` every micro-batch has the same number of tokens.",
    otherwise="Transformer Engine copies past the buffers' end, or short of it; the run refuses the batch.",
    broken=f"{_OVERLAPPED} model.config.moe_token_dispatcher_type=alltoall model.config.variable_seq_lengths=True",
    mended=f"{_OVERLAPPED} model.config.moe_token_dispatcher_type=alltoall model.config.variable_seq_lengths=False",
)
def _one_size(facts: Facts) -> Iterator[str]:
    yield from facts.settled.refused("userbuffers-have-one-size")


@OVERLAP.rule(
    "every-projection-has-a-userbuffer",
    says="`tp_comm_overlap`, set on the model, needs projections that Transformer Engine has buffers for: not those of "
    "multi-latent attention, multi-token prediction and layers that stand in for others.",
    otherwise="Megatron-Core turns it off for the whole model, or Transformer Engine finds no buffer in the first step.",
    recipe="deepseek_v2_lite",
    broken=f"{_OVERLAPPED} strategy.expert_tensor_parallel_size=1",
    mended=f"model.config.tp_comm_overlap=False {TP}=2 {_SP} strategy.expert_tensor_parallel_size=1",
)
def _buffers(facts: Facts) -> Iterator[str]:
    yield from facts.settled.refused("every-projection-has-a-userbuffer")


@OVERLAP.rule(
    "buckets-have-elements",
    says="`bucket_size` is at least 1, or None.",
    otherwise="Megatron-Core would put each parameter into no bucket.",
    broken="strategy.ddp.bucket_size=0",
    mended="strategy.ddp.bucket_size=40000000",
)
def _buckets(facts: Facts) -> Iterator[str]:
    size = getattr(facts.ddp, "bucket_size", None)
    if isinstance(size, int) and size < 1:
        yield f"strategy.ddp_config.bucket_size={size}: must be at least 1 element, or None for Megatron-Core's choice."


@OVERLAP.rule(
    "overlap-is-asked-for-once",
    says="What the overlap callback is asked for, and what the model, the optimizer and the gradient buffers are, agree.",
    otherwise="The callback refuses on every rank.",
    recipe="nemotronh_8b",
    broken="trainer.callbacks[1].overlap_grad_reduce=False strategy.ddp.overlap_grad_reduce=True",
    mended="strategy.ddp.overlap_grad_reduce=True",
)
def _callback(facts: Facts) -> Iterator[str]:
    yield from facts.settled.refused("overlap-is-asked-for-once")
