# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's attention backends: whether one that a recipe names can be used."""

from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from nemo2.config.walk import class_of
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

ATTENTION = Topic("Attention")
_BACKEND = "model.config.attention_backend"


@ATTENTION.rule("back-end-is-left")
def _left(facts: Facts) -> Iterator[str]:
    """The attention backend must support the other settings. `flash` supports neither learned sinks nor head sizes
    that are not multiples of 8. `fused` has no deterministic mode. `unfused` does not support context parallelism.
    Only `unfused` supports fp32.

    Otherwise: Transformer Engine finds no attention backend in the first step.
    """
    config, version = facts.sized_config, facts.machine.transformer_engine
    backend = facts.of_model("attention_backend")
    name = str(getattr(backend, "name", backend))
    if config is None or version is None or getattr(config, "attn_logit_softcapping", None):
        return  # plain attention has no backends
    packed = facts.packed
    beside = _beside(config, facts.precision, facts.layout.cp, packed=packed, version=Version(version))
    for setting, left in beside:
        if name in ("local", *_NAMES) and name not in left:
            instead = " or ".join(map(repr, left))
            yield (
                f"{_BACKEND}={name} {setting}: Transformer Engine does not support this combination. Set {_BACKEND} "
                f"to {instead}, or to 'auto' for the fastest backend that works."
            )
            return


@ATTENTION.rule("largest-scores-have-a-reader")
def _scores(facts: Facts) -> Iterator[str]:
    """`qk_clip` and `log_max_attention_logit` must be False.

    Otherwise: Nothing is clipped or logged. Megatron-Core leaves both to the training loop, and nemo2 does neither.
    """
    for name, done in (("qk_clip", "clips the weights of queries and keys"), ("log_max_attention_logit", "logs it")):
        if facts.of_model(name):
            yield (
                f"model.config.{name}=True: layers only keep their largest attention score, and no training step of nemo2 "
                f"{done}. Set {name}=False."
            )


@ATTENTION.rule("latent-attention-has-its-sizes")
def _latent(facts: Facts) -> Iterator[str]:
    """`multi_latent_attention` requires a model configuration with the sizes of its projections, such as DeepSeek's.

    Otherwise: The model raises AttributeError on every rank.
    """
    if facts.of_model("multi_latent_attention") and not hasattr(facts.written_config, "kv_lora_rank"):
        yield (
            f"model.config.multi_latent_attention=True: {class_of(facts.model).__name__} has no sizes for latent attention. Set "
            "it to False, or use a model with latent attention, such as DeepSeek's."
        )


@ATTENTION.rule("latent-attention-has-settings-of-its-own")
def _latent_settings(facts: Facts) -> Iterator[str]:
    """Multi-latent attention has its own norms, scale and rotation, and no biases: `qk_l2_norm`, `qk_layernorm_over_heads`,
    `softmax_scale`, `add_qkv_bias` and `no_rope_freq` must stay unset, and `position_embedding_type` must not be none.

    Otherwise: The model raises an error, or trains without the setting.
    """
    if not facts.of_model("multi_latent_attention"):
        return
    for name in ("qk_l2_norm", "qk_layernorm_over_heads", "softmax_scale", "add_qkv_bias", "no_rope_freq"):
        if value := facts.of_model(name):
            yield f"model.config.{name}={value!r}: latent attention doesn't support it. Leave it unset."
    if facts.of_model("position_embedding_type") == "none":
        yield (
            "model.config.position_embedding_type='none': latent attention rotates qk_pos_emb_head_dim channels of each head "
            "all the same. Set 'rope'."
        )


@ATTENTION.rule("norms-over-heads-are-rms-norms")
def _norms_over_heads(facts: Facts) -> Iterator[str]:
    """`qk_layernorm_over_heads` requires `qk_layernorm`, and RMSNorm.

    Otherwise: The model raises an error when it builds the first layer. With `qk_l2_norm` in place of `qk_layernorm` it
    trains, and Megatron-Core doesn't add up the gradients of these norms over tensor-parallel ranks.
    """
    if not facts.of_model("qk_layernorm_over_heads"):
        return
    for name, value in (("qk_layernorm", True), ("normalization", "RMSNorm")):
        if (requested := facts.of_model(name)) != value:
            yield (
                f"model.config.qk_layernorm_over_heads=True with {name}={requested!r}: these are RMSNorms that take the place "
                f"of the norms of each head. Set {name}={value!r}, or set qk_layernorm_over_heads=False."
            )


@ATTENTION.rule("hybrid-layers-have-one-norm")
def _hybrid_norms(facts: Facts) -> Iterator[str]:
    """The layers of a hybrid have a norm in front, and no other, unless they are your own (`mamba_stack_spec`).

    Otherwise: The model trains without the setting, or with it in some of its layers.
    """
    if not facts.is_hybrid:
        return
    from nemo2.models.ssm import default_stack_spec

    if facts.of_model("mamba_stack_spec") is not default_stack_spec:
        return
    absent = ("qk_layernorm", "qk_l2_norm", "qk_layernorm_over_heads", "post_sublayer_layernorm")
    for name, value in (("pre_sublayer_layernorm", True), *((norm, False) for norm in absent)):
        if facts.of_model(name, value) != value:
            yield f"model.config.{name}={not value}: the layers of a hybrid have a norm in front, and no other. Set {value}."


@ATTENTION.rule("fused-qkv-rope-rotates-all-layers")
def _fused_qkv_rope(facts: Facts) -> Iterator[str]:
    """`fused_single_qkv_rope` requires rotary positions in each layer, queries and keys without norms, and one sample
    per row.

    Otherwise: The first layer with attention raises an assertion in the first step.
    """
    if not facts.settled.value("model.config", "fused_single_qkv_rope")[1] or facts.of_model("multi_latent_attention"):
        return
    positions = facts.of_model("position_embedding_type")
    beside = [
        f"model.config.{name}=True"
        for name in ("qk_layernorm", "qk_l2_norm", "qk_layernorm_over_heads", "test_mode", "flash_decode")
        if facts.of_model(name)
    ]
    if positions not in ("rope", "yarn"):
        beside.append(f"model.config.position_embedding_type={positions!r}")
    if facts.of_model("no_rope_freq"):
        beside.append("model.config.no_rope_freq")
    if facts.packed:
        beside.append("packed samples")
    if beside:
        yield (
            f"model.config.fused_single_qkv_rope=True with {' and '.join(beside)}: the kernel rotates queries and keys of "
            "one sample as they leave their projection. Set fused_single_qkv_rope=False."
        )


_NAMES = ("flash", "fused", "unfused")
_UNFUSED_PACKS_SINCE = Version("2.13")
_FLASH_TAKES_TWO_SIZES_SINCE = Version("2.17")


def _beside(
    config: Any, precision: Any, cp: int, *, packed: bool, version: Version
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings in words, each with the backends that support it. Source: ``get_attention_backend``
    (tests/transformer_engine)."""
    yield "with Transformer Engine's layers", _NAMES  # 'local' isn't a backend of Transformer Engine
    if cp > 1:
        yield f"with strategy.context_parallel_size={cp}", ("flash", "fused")
    if config.softmax_type != "vanilla":
        yield f"with model.config.softmax_type={config.softmax_type!r}", ("fused", "unfused")
    if config.kv_channels and config.kv_channels % 8:
        yield f"with model.config.kv_channels={config.kv_channels}, which is not a multiple of 8", ("fused", "unfused")
    if getattr(config, "multi_latent_attention", False) and version < _FLASH_TAKES_TWO_SIZES_SINCE:
        yield "with heads of two sizes (multi-latent attention)", ("fused", "unfused")
    if getattr(config, "deterministic_mode", False):
        yield "with model.config.deterministic_mode=True", ("flash", "unfused")
    if packed and version < _UNFUSED_PACKS_SINCE:
        yield f"with packed samples, under Transformer Engine {version}", ("flash", "fused")
    if precision is not None and precision.fp8:
        if precision.fp8_dot_product_attention or precision.fp8_multi_head_attention:
            yield "with attention in fp8", ("fused",)
    elif precision is not None and not (precision.bf16 or precision.fp16):
        yield "in fp32", ("unfused",)
