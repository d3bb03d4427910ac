# SPDX-License-Identifier: Apache-2.0
"""The model by itself: widths, heads, layers, vocabulary, the names of its parts."""

from collections.abc import Iterator
from typing import Any

from nemo2.checks import domains
from nemo2.checks.arithmetic import divisors, is_count
from nemo2.checks.domains import out_of_range
from nemo2.checks.facts import Facts, number
from nemo2.checks.rule import Topic
from nemo2.config.walk import class_of
from nemo2.names import did_you_mean

SHAPE = Topic("The model", needs_sizes=False)


@SHAPE.rule(
    "model-numbers-are-in-range",
    says="Each number of the model's configuration is one that Megatron-Core can compute with: widths, layers and heads of at "
    "least 1, an epsilon that is not negative, a rotary base above 0; none is NaN or infinite.",
    otherwise="A ZeroDivisionError or TypeError from inside Megatron-Core, a model of nothing, or NaN in the first step.",
    broken="model.config.num_layers=0 model.config.layernorm_epsilon=-1",
    mended="model.config.num_layers=1 model.config.layernorm_epsilon=0",
    megatron_refuses=True,
)
def _numbers(facts: Facts) -> Iterator[str]:
    yield from out_of_range(facts.model, "model.config", domains.MODEL)


@SHAPE.rule(
    "heads-in-groups",
    says="The query groups divide the attention heads.",
    otherwise="Megatron-Core rounds down and builds projections of other shapes than the heads need.",
    broken="model.config.num_query_groups=3",
    mended="model.config.num_query_groups=4",
)
def _groups(facts: Facts) -> Iterator[str]:
    heads, groups = facts.of_model("num_attention_heads"), facts.of_model("num_query_groups")
    if is_count(heads) and is_count(groups) and heads % groups:
        yield (
            f"model.config.num_attention_heads={heads} is not a multiple of model.config.num_query_groups={groups}; groups that "
            f"divide them: {divisors(heads)}."
        )


@SHAPE.rule(
    "hidden-over-heads",
    says="The heads divide the hidden size, where the width of a head (`kv_channels`) is not set.",
    otherwise="Megatron-Core rounds the width of a head down.",
    broken="model.config.hidden_size=4100",
    mended="model.config.hidden_size=4100 model.config.kv_channels=128",
)
def _hidden(facts: Facts) -> Iterator[str]:
    hidden, heads = facts.of_model("hidden_size"), facts.of_model("num_attention_heads")
    latent = facts.of_model("multi_latent_attention") or hasattr(facts.model, "mamba_stack_spec")
    # Read off the node: the built configuration has derived the width by rounding.
    if is_count(hidden) and is_count(heads) and hidden % heads and not latent and facts.model.kv_channels is None:
        yield f"model.config.hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and kv_channels is unset."


@SHAPE.rule(
    "rotary-width-is-even",
    says="The rotated part of a head (`kv_channels` * `rotary_percent`) is even.",
    otherwise="The first step fails: channels are rotated in pairs.",
    broken="model.config.kv_channels=127",
    mended="model.config.kv_channels=128",
)
def _rotary(facts: Facts) -> Iterator[str]:
    if facts.of_model("position_embedding_type") != "rope" or facts.of_model("multi_latent_attention"):
        return
    width, share = facts.of_model("kv_channels"), facts.of_model("rotary_percent", 1.0)
    if is_count(width) and int(width * share) % 2:
        yield (
            f"model.config.kv_channels={width} * rotary_percent={share} = {int(width * share)} channels are rotated in pairs, so "
            "they must be even."
        )


@SHAPE.rule(
    "vocabulary-holds-the-tokenizer",
    says="A vocabulary size that is set holds every token of the data.",
    otherwise="With tensor parallelism the other tokens are embedded as zeros, and the loss looks lower than it is.",
    broken="model.config.vocab_size=32000",
    mended="model.config.vocab_size=50304",
)
def _vocabulary(facts: Facts) -> Iterator[str]:
    rows, tokens = facts.of_model("vocab_size"), tokenizer_size(facts)
    if is_count(rows) and tokens is not None and rows < tokens:
        yield (
            f"model.config.vocab_size={rows} is smaller than the tokenizer's {tokens} tokens: raise it, or leave it unset to "
            "have it derived."
        )


@SHAPE.rule(
    "normalization-is-known",
    says="The norm is LayerNorm or RMSNorm.",
    otherwise="Megatron-Core raises when the first layer is built.",
    broken="model.config.normalization=RMSnorm",
    mended="model.config.normalization=RMSNorm",
    megatron_refuses=True,
)
def _normalization(facts: Facts) -> Iterator[str]:
    yield from _one_of(facts, "normalization", ("LayerNorm", "RMSNorm", "L2Norm"))


@SHAPE.rule(
    "position-embedding-is-known",
    says="The position embedding is learned_absolute, rope or none (mrope and yarn where Megatron-Core has them).",
    otherwise="Megatron-Core builds a model without positions.",
    broken="",
    mended="",
    assigned=({"model.config.position_embedding_type": "rotary"}, {"model.config.position_embedding_type": "rope"}),
)
def _positions(facts: Facts) -> Iterator[str]:
    yield from _one_of(
        facts, "position_embedding_type", ("learned_absolute", "rope", "none", "mrope", "yarn", "relative")
    )


@SHAPE.rule(
    "fused-activation-is-known",
    says="`bias_activation_fusion` needs an activation that has a fused kernel: gelu, gated silu (SwiGLU) or quick_gelu.",
    otherwise="Megatron-Core refuses the model's configuration, or, for silu without a gate, the first step.",
    recipe="nemotron3_4b",
    broken="model.config.bias_activation_fusion=True",
    mended="model.config.bias_activation_fusion=False",
    megatron_refuses=True,
)
def _fused_activation(facts: Facts) -> Iterator[str]:
    if not getattr(facts.model, "bias_activation_fusion", False):
        return
    import torch.nn.functional as F
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    activation = facts.of_model("activation_func")
    name = getattr(activation, "__name__", activation)
    if activation not in (F.gelu, F.silu, quick_gelu):
        yield (
            f"model.config.bias_activation_fusion=True with activation_func={name}: Megatron-Core has fused kernels for gelu, "
            "silu and quick_gelu. Set bias_activation_fusion=False."
        )
    elif activation is F.gelu and not facts.of_model("gated_linear_unit") and not facts.of_model("add_bias_linear"):
        yield (
            "model.config.bias_activation_fusion=True with a plain gelu needs a bias to add: set "
            "bias_activation_fusion=False, or add_bias_linear=True."
        )
    elif activation is F.silu and not facts.of_model("gated_linear_unit") and not _only_experts(facts):
        yield (
            "model.config.bias_activation_fusion=True with silu: the fused kernel is SwiGLU's. Set gated_linear_unit=True, or "
            "bias_activation_fusion=False."
        )


def _only_experts(facts: Facts) -> bool:
    """Whether no layer is a plain MLP: experts don't take the fused kernel."""
    pattern = facts.of_model("moe_layer_freq")
    return bool(facts.of_model("num_moe_experts")) and (pattern == 1 or (isinstance(pattern, list) and all(pattern)))


@SHAPE.rule(
    "layer-pattern-has-every-layer",
    says="A pattern of layers names as many as there are.",
    otherwise="The model is refused when it is built.",
    recipe="mamba2_130m",
    broken="model.config.num_layers=12",
    mended="model.config.num_layers=12 model.config.hybrid_override_pattern=MMMMMMMMMMMM",
    megatron_refuses=True,
)
def _pattern(facts: Facts) -> Iterator[str]:
    from nemo2.models.walker import pattern_problems

    layers = facts.of_model("num_layers")
    yield from pattern_problems(facts.config if facts.config is not None else facts.model)
    for name in ("moe_layer_freq", "no_rope_freq", "linear_attention_freq"):
        pattern = facts.of_model(name)
        if isinstance(pattern, list) and is_count(layers) and len(pattern) != layers:
            yield (
                f"model.config.{name} names {len(pattern)} layers, and model.config.num_layers={layers}: make them agree."
            )


def tokenizer_size(facts: Facts) -> int | None:
    """Tokens of the data's tokenizer, as far as the recipe says without opening a file."""
    tokenizer = getattr(facts.data, "tokenizer", None)
    if tokenizer is not None:
        return number(tokenizer, "vocab_size")
    if getattr(facts.data, "vocab_file", None) is not None:
        return None
    return getattr(class_of(facts.data), "size_without_tokenizer", None)


def _one_of(facts: Facts, name: str, known: tuple[str, ...]) -> Iterator[str]:
    value: Any = facts.of_model(name)
    if isinstance(value, str) and value not in known:
        yield f"model.config.{name}={value!r}: must be one of {', '.join(known)}{did_you_mean(value, known)}"
