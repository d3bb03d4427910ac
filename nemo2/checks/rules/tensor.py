# SPDX-License-Identifier: Apache-2.0
"""Widths that tensor parallelism splits, and the sequence that sequence parallelism splits."""

from collections.abc import Iterator

from nemo2.checks.arithmetic import divisors, is_count, nearest
from nemo2.checks.facts import Facts
from nemo2.checks.rule import Topic
from nemo2.checks.rules.world import CP, TP
from nemo2.models.layers import rules as layers

TENSOR = Topic("Tensor and sequence parallelism")
SP = "strategy.sequence_parallel=True"


@TENSOR.rule(
    "heads-over-tensor-ranks",
    says="The tensor size divides the attention heads.",
    otherwise="Megatron-Core refuses the model's configuration.",
    broken=f"{TP}=3 {CP}=1 trainer.devices=6 data.global_batch_size=510 model.config.ffn_hidden_size=14352 "
    "model.config.num_query_groups=1 model.config.vocab_size=129024",
    mended=f"{TP}=2 {CP}=1 trainer.devices=6 data.global_batch_size=510",
    megatron_refuses=True,
)
def _heads(facts: Facts) -> Iterator[str]:
    heads, tp = facts.of_model("num_attention_heads"), facts.layout.tp
    if heads and heads % tp:
        yield (
            f"model.config.num_attention_heads={heads} is not a multiple of strategy.tensor_model_parallel_size={tp}; sizes that "
            f"divide it: {divisors(heads)}."
        )


@TENSOR.rule(
    "groups-over-tensor-ranks",
    says="The query groups are a multiple or a divisor of the tensor size.",
    otherwise="Megatron-Core refuses the model's configuration.",
    broken=f"{TP}=8 {CP}=1 {SP} model.config.num_attention_heads=24 model.config.num_query_groups=12 "
    "model.config.kv_channels=128",
    mended=f"{TP}=8 {CP}=1 {SP} model.config.num_attention_heads=24 model.config.num_query_groups=8 "
    "model.config.kv_channels=128",
    megatron_refuses=True,
)
def _groups(facts: Facts) -> Iterator[str]:
    groups, tp = facts.of_model("num_query_groups"), facts.layout.tp
    if groups and groups % tp and tp % groups:
        yield (
            f"model.config.num_query_groups={groups} is neither a multiple nor a divisor of "
            f"strategy.tensor_model_parallel_size={tp}; sizes that work: {divisors(groups)}, or a multiple of {groups}."
        )


@TENSOR.rule(
    "feed-forward-over-tensor-ranks",
    says="The tensor size divides the feed-forward width.",
    otherwise="Megatron-Core asserts when the first layer is built.",
    broken=f"{TP}=2 model.config.ffn_hidden_size=14335",
    mended=f"{TP}=2 model.config.ffn_hidden_size=14336",
    megatron_refuses=True,
)
def _feed_forward(facts: Facts) -> Iterator[str]:
    ffn, tp = facts.of_model("ffn_hidden_size"), facts.layout.tp
    if ffn and ffn % tp:
        yield (
            f"model.config.ffn_hidden_size={ffn} is not a multiple of strategy.tensor_model_parallel_size={tp}; "
            f"nearest: {nearest(ffn, tp)}."
        )


@TENSOR.rule(
    "vocabulary-over-tensor-ranks",
    says="A vocabulary size that is set is a multiple of the tensor size; an unset one is padded.",
    otherwise="Megatron-Core asserts when the embedding is built.",
    broken=f"{TP}=8 {CP}=1 {SP} model.config.vocab_size=128260",
    mended=f"{TP}=8 {CP}=1 {SP} model.config.vocab_size=128264",
    megatron_refuses=True,
)
def _vocabulary(facts: Facts) -> Iterator[str]:
    rows, tp = facts.of_model("vocab_size"), facts.layout.tp
    if is_count(rows) and rows % tp:
        yield (
            f"model.config.vocab_size={rows} is not a multiple of strategy.tensor_model_parallel_size={tp}: use "
            f"{-(-rows // tp) * tp}, or leave it unset to have it padded."
        )


@TENSOR.rule(
    "sequence-parallel-needs-tensor-ranks",
    says="Sequence parallelism needs a tensor size of 2 or more.",
    otherwise="Megatron-Core refuses the model's configuration.",
    broken=f"{SP}",
    mended=f"{SP} {TP}=2",
    megatron_refuses=True,
)
def _sequence_parallel(facts: Facts) -> Iterator[str]:
    if facts.layout.sp and facts.layout.tp == 1:
        yield (
            "strategy.sequence_parallel=True with strategy.tensor_model_parallel_size=1: it splits the sequence over the "
            "tensor-parallel ranks, and there is one. Set sequence_parallel=False, or raise the tensor size."
        )


@TENSOR.rule(
    "sequence-over-tensor-ranks",
    says="With sequence parallelism, tensor size * context size divides the sequence.",
    otherwise="Megatron-Core asserts in the first step.",
    broken=f"{TP}=8 {CP}=1 {SP} data.seq_length=8188",
    mended=f"{TP}=8 {CP}=1 {SP} data.seq_length=8184",
)
def _sequence(facts: Facts) -> Iterator[str]:
    layout, seq = facts.layout, facts.seq_length
    if layout.sp and layout.tp > 1 and seq and seq % (layout.tp * layout.cp):
        yield (
            f"data.seq_length={seq} is not a multiple of tensor_model_parallel_size * context_parallel_size = "
            f"{layout.tp} * {layout.cp}, over which sequence parallelism splits it; "
            f"nearest: {nearest(seq, layout.tp * layout.cp * (2 if layout.cp > 1 else 1))}."
        )


@TENSOR.rule(
    "latent-attention-over-tensor-ranks",
    says="Multi-latent attention over tensor ranks needs sequence parallelism.",
    otherwise="Megatron-Core trains, with the query norm's gradient too large by the tensor size.",
    recipe="deepseek_v2_lite",
    broken=f"{TP}=2 strategy.expert_tensor_parallel_size=1",
    mended=f"{TP}=2 strategy.expert_tensor_parallel_size=1 {SP}",
)
def _latent_attention(facts: Facts) -> Iterator[str]:
    if facts.sized_config is not None:
        yield from layers.mla_needs_sequence_parallel(facts.sized_config)


@TENSOR.rule(
    "mixers-over-tensor-ranks",
    says="The tensor size divides the heads and the groups of Mamba mixers.",
    otherwise="Megatron-Core asserts when the first mixer is built.",
    recipe="mamba2_8b",
    broken=f"{TP}=8 {SP} model.config.mamba_num_groups=4",
    mended=f"{TP}=8 {SP} model.config.mamba_num_groups=8",
    megatron_refuses=True,
)
def _mixers(facts: Facts) -> Iterator[str]:
    if not hasattr(facts.model, "mamba_stack_spec"):
        return
    tp, hidden = facts.layout.tp, facts.of_model("hidden_size")
    width = facts.of_model("mamba_head_dim")
    heads = facts.of_model("mamba_num_heads") or (2 * hidden // width if hidden and width else None)
    for name, value in (("mamba_num_heads", heads), ("mamba_num_groups", facts.of_model("mamba_num_groups"))):
        if value and value % tp:
            yield (
                f"model.config.{name}={value} is not a multiple of strategy.tensor_model_parallel_size={tp}; sizes that divide "
                f"it: {divisors(value)}."
            )
