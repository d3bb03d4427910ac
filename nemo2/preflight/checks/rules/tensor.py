# SPDX-License-Identifier: Apache-2.0
"""Rules of tensor and sequence parallelism: the widths and the sequence that they shard."""

from collections.abc import Iterator

from nemo2.models.layers import rules as layers
from nemo2.preflight.checks.arithmetic import divisors, indivisible, nearest
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

TENSOR = Topic("Tensor and sequence parallelism")
_SIZE = "strategy.tensor_model_parallel_size"


@TENSOR.rule("feed-forward-over-tensor-ranks", megatron_refuses=True)
def _feed_forward(facts: Facts) -> Iterator[str]:
    """The tensor-parallel size must divide the width of the feed-forward layers, unless all of them are experts, or a hybrid
    has none.

    Otherwise: Megatron-Core raises an AssertionError when it builds the first layer.
    """
    if facts.has_plain_mlps:
        yield from indivisible(
            "model.config.ffn_hidden_size", facts.of_model("ffn_hidden_size"), _SIZE, facts.layout.tp
        )


@TENSOR.rule("sequence-over-tensor-ranks")
def _sequence(facts: Facts) -> Iterator[str]:
    """With sequence parallelism, tensor-parallel size * context-parallel size must divide the sequence length.

    Otherwise: Megatron-Core raises an AssertionError in the first step.
    """
    layout, seq = facts.layout, facts.seq_length
    if layout.sp and layout.tp > 1 and seq and seq % (layout.tp * layout.cp):
        yield (
            f"data.seq_length={seq} is not a multiple of tensor_model_parallel_size * context_parallel_size = "
            f"{layout.tp} * {layout.cp}, the number of parts that sequence parallelism needs. Set seq_length to a "
            f"multiple; nearest: {nearest(seq, layout.tp * layout.cp * (2 if layout.cp > 1 else 1))}."
        )


@TENSOR.rule("loss-reads-slices-of-the-vocabulary")
def _parallel_output(facts: Facts) -> Iterator[str]:
    """The loss requires `parallel_output`.

    Otherwise: Megatron-Core's loss takes gathered logits for a slice of the vocabulary: tensor-parallel ranks train on another
    loss without an error, and one rank raises a RuntimeError in the first step.
    """
    if facts.of_model("parallel_output", True) is False:
        yield (
            "model.config.parallel_output=False: the loss would take the gathered logits for one rank's slice of the "
            "vocabulary. Set parallel_output=True."
        )


@TENSOR.rule("latent-attention-over-tensor-ranks")
def _latent_attention(facts: Facts) -> Iterator[str]:
    """Multi-latent attention with tensor parallelism requires sequence parallelism, and a `num_query_groups` of at least the
    tensor-parallel size.

    Otherwise: The model trains with a gradient of the query norm that is too large by a factor of the tensor-parallel
    size, without an error; or Megatron-Core raises a RuntimeError in the first step.
    """
    yield from facts.of_layers(layers.mla_over_tensor_ranks)


def _gates_are_whole() -> bool:
    """Whether a rank that has some query heads of a group would gate them with all of this group's gates, as
    Megatron-Core 0.16.1 does."""
    import inspect

    from megatron.core.transformer.attention import SelfAttention

    return "gate = gate[" not in inspect.getsource(SelfAttention.get_query_key_value_tensors)


@TENSOR.rule("gates-over-tensor-ranks", in_force=_gates_are_whole)
def _gates(facts: Facts) -> Iterator[str]:
    """With `attention_output_gate` the tensor-parallel size must be at most `num_query_groups`.

    Otherwise: Megatron-Core 0.16 raises a RuntimeError in the first step.
    """
    groups, tp = facts.of_model("num_query_groups"), facts.layout.tp
    if (
        facts.of_model("attention_output_gate")
        and groups
        and groups < tp
        and not facts.of_model("multi_latent_attention")
    ):
        yield (
            f"model.config.attention_output_gate=True with {_SIZE}={tp}: the installed Megatron-Core doesn't split the gates of "
            f"num_query_groups={groups} groups over more ranks. Set tensor_model_parallel_size to {groups} or less, or install "
            "Megatron-Core 0.19."
        )


@TENSOR.rule("mixers-over-tensor-ranks", megatron_refuses=True)
def _mixers(facts: Facts) -> Iterator[str]:
    """The tensor-parallel size must divide the numbers of heads and groups of Mamba mixers, and the groups the heads.

    Otherwise: Megatron-Core raises an AssertionError when it builds the first mixer.
    """
    if not facts.is_hybrid:
        return
    tp, hidden = facts.layout.tp, facts.of_model("hidden_size")
    width = facts.of_model("mamba_head_dim")
    heads = facts.of_model("mamba_num_heads") or (2 * hidden // width if hidden and width else None)
    groups = facts.of_model("mamba_num_groups")
    if heads and groups and heads % groups:
        yield (
            f"model.config.mamba_num_groups={groups} does not divide the {heads} heads of a Mamba mixer. Set mamba_num_groups "
            f"to one of {divisors(heads)}."
        )
    for name, value in (("mamba_num_heads", heads), ("mamba_num_groups", groups)):
        yield from indivisible(f"model.config.{name}", value, _SIZE, tp, keep=True)
