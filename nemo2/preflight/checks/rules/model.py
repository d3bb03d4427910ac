# SPDX-License-Identifier: Apache-2.0
"""Rules of the model itself: widths, heads, layers, vocabulary and the names of its parts."""

from collections.abc import Iterator

from nemo2.base.backend.compilation import uncompiled
from nemo2.base.counts import is_count
from nemo2.checkpoint.auto_resume import starts_from_weights
from nemo2.config.domains import out_of_range
from nemo2.config.walk import class_of
from nemo2.preflight.checks import domains
from nemo2.preflight.checks.arithmetic import indivisible
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

MODEL = Topic("The model", needs_sizes=False)


@MODEL.rule("model-numbers-are-in-range", megatron_refuses=True)
def _numbers(facts: Facts) -> Iterator[str]:
    """Each number of the model configuration must be in its valid range and must not be NaN or infinite: for
    example, widths, layers and heads of at least 1, an epsilon that is not negative, and a rotary base above 0. The
    normalization, the position embedding and other texts must be those that Megatron-Core knows.

    Otherwise: Megatron-Core raises an error when it builds the first layer, builds an empty model or one without position
    embeddings, balances no experts, or computes NaN in the first step.
    """
    yield from out_of_range(
        facts.model, "model.config", {**domains.MODEL, **domains.model_texts(class_of(facts.model))}
    )


@MODEL.rule("heads-in-groups")
def _groups(facts: Facts) -> Iterator[str]:
    """The number of query groups must divide the number of attention heads.

    Otherwise: Megatron-Core rounds down and builds projections with the wrong shapes.
    """
    heads, groups = facts.of_model("num_attention_heads"), facts.of_model("num_query_groups")
    yield from indivisible(
        "model.config.num_attention_heads", heads, "model.config.num_query_groups", groups, keep=True
    )


@MODEL.rule("hidden-over-heads")
def _hidden(facts: Facts) -> Iterator[str]:
    """The number of heads must divide the hidden size, unless the width of a head (`kv_channels`) is set.

    Otherwise: Megatron-Core rounds the width of a head down.
    """
    hidden, heads = facts.of_model("hidden_size"), facts.of_model("num_attention_heads")
    latent = facts.of_model("multi_latent_attention") or facts.is_hybrid
    # Read from the node, because the built configuration derives the width by rounding.
    if is_count(hidden) and is_count(heads) and hidden % heads and not latent and facts.model.kv_channels is None:
        yield (
            f"model.config.hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and kv_channels is "
            f"unset. Set hidden_size to a multiple of {heads}, or set kv_channels."
        )


@MODEL.rule("rotary-width-is-even")
def _rotary(facts: Facts) -> Iterator[str]:
    """The number of rotated channels of a head (`kv_channels` * `rotary_percent`, or `qk_pos_emb_head_dim` of latent
    attention) must be even.

    Otherwise: The first step fails, because channels are rotated in pairs.
    """
    if facts.of_model("position_embedding_type") != "rope":
        return
    if facts.of_model("multi_latent_attention"):
        if is_count(width := facts.of_model("qk_pos_emb_head_dim")) and width % 2:
            yield f"model.config.qk_pos_emb_head_dim={width}: channels are rotated in pairs. Set an even number."
        return
    width, share = facts.of_model("kv_channels"), facts.of_model("rotary_percent", 1.0)
    if is_count(width) and int(width * share) % 2:
        yield (
            f"model.config.kv_channels={width} * rotary_percent={share} gives {int(width * share)} rotated channels, "
            "but channels are rotated in pairs. Set kv_channels or rotary_percent so that the product is even."
        )


@MODEL.rule("weights-are-initialized")
def _initialized(facts: Facts) -> Iterator[str]:
    """`perform_initialization=False` requires weights to start from.

    Otherwise: The model trains from what the memory holds, or the first step's gradients aren't finite.
    """
    uninitialized = facts.trains and facts.of_model("perform_initialization") is False
    if uninitialized and not starts_from_weights(facts.at("resume"), facts.strategy):
        yield (
            "model.config.perform_initialization=False: no weights are named that replace the uninitialized ones. Leave it "
            "True, or set resume.restore_config."
        )


@MODEL.rule("fused-activations-have-kernels")
def _fused_activation(facts: Facts) -> Iterator[str]:
    """`bias_activation_fusion` requires a kernel for the activation. Plain MLPs have one for gelu and for silu with a gate,
    experts of Transformer Engine for silu and quick_gelu with a gate.

    Otherwise: Every rank stops in its first step.
    """
    function, gated = uncompiled(facts.of_model("activation_func")), facts.of_model("gated_linear_unit")
    name = getattr(function, "__name__", "")
    if not getattr(facts.model, "bias_activation_fusion", False) or name not in ("gelu", "silu", "quick_gelu"):
        return  # Megatron-Core refuses all others
    has_plain = facts.has_plain_mlps or facts.of_model("moe_shared_expert_intermediate_size")
    interleaved = gated and facts.of_model("moe_mlp_glu_interleave_size")
    has_experts = facts.has_experts and facts.machine.transformer_engine is not None and not interleaved
    for layers, exist, fused in (
        ("plain MLPs", has_plain, name == "gelu" or (name == "silu" and gated)),
        ("experts", has_experts, name != "gelu" and gated),
    ):
        if exist and not fused:
            yield (
                f"model.config.bias_activation_fusion=True with {'gated' if gated else 'ungated'} {name}: Megatron-Core has no "
                f"fused kernel of it for {layers}. Set bias_activation_fusion=False."
            )


@MODEL.rule("bounded-activation-is-not-fused")
def _bounded_activation(facts: Facts) -> Iterator[str]:
    """`activation_func_clamp_value` with `bias_activation_fusion` requires quick_gelu.

    Otherwise: The fused kernels of other activations ignore the bound, without an error.
    """
    bound, function = facts.of_model("activation_func_clamp_value"), uncompiled(facts.of_model("activation_func"))
    fused = getattr(facts.model, "bias_activation_fusion", False) and getattr(function, "__name__", "") != "quick_gelu"
    if fused and bound is not None:
        yield (
            f"model.config.activation_func_clamp_value={bound} with bias_activation_fusion=True: only the fused kernel of "
            "quick_gelu applies the bound. Set model.config.bias_activation_fusion=False."
        )


@MODEL.rule("activation-settings-have-a-gate")
def _ungated(facts: Facts) -> Iterator[str]:
    """`activation_func_clamp_value` and `glu_linear_offset` require a gate (`gated_linear_unit`).

    Otherwise: The model trains without the bound or the offset.
    """
    for name in ("activation_func_clamp_value", "glu_linear_offset"):
        if (value := facts.of_model(name)) and not facts.of_model("gated_linear_unit"):
            yield (
                f"model.config.{name}={value} with gated_linear_unit=False: only the gate reads it. Set "
                f"gated_linear_unit=True, or leave {name} unset."
            )


@MODEL.rule("layer-pattern-has-every-layer", megatron_refuses=True)
def _pattern(facts: Facts) -> Iterator[str]:
    """A pattern of layers must have one entry per layer, and that of a hybrid the layers of each additional prediction too.

    Otherwise: The model raises an error when it is built.
    """
    layers = facts.of_model("num_layers")
    if facts.is_hybrid:
        from nemo2.models.hybrid_pattern import pattern_problems

        yield from pattern_problems(facts.written_config)
    names = ["no_rope_freq", "linear_attention_freq"]
    if not facts.is_hybrid:
        names.append("moe_layer_freq")
    if facts.of_model("window_size"):  # without one, Megatron-Core doesn't read it
        names.append("window_attn_skip_freq")
    for name in names:
        # As it was set: of a frequency out of range, Megatron-Core makes no entries.
        pattern = getattr(facts.model, name, None)
        if isinstance(pattern, list) and is_count(layers) and len(pattern) != layers:
            yield (
                f"model.config.{name} has {len(pattern)} entries, but model.config.num_layers={layers}. Set a pattern "
                "with one entry per layer."
            )
