# SPDX-License-Identifier: Apache-2.0
"""Settings for which Megatron-Core needs a newer Transformer Engine than the oldest that nemo2 supports.

Megatron-Core checks the version where a layer is built or first called, on every rank. Checks in its configuration
aren't repeated here. A test compares this list with each version comparison in Megatron-Core's sources.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from packaging.version import Version

from nemo2.base.errors import ConfigError
from nemo2.config.requested import at
from nemo2.mcore.parallel.cuda_graphs import kind_of, modules_of


class Need(NamedTuple):
    """Fields of ``model.config`` that together need a version, and the condition under which they do."""

    since: str
    fields: tuple[str, ...]
    applies: Callable[[Any, Any], bool]
    """Whether the settled configurations of the model and the gradient buffers need it."""
    instead: str


def _set(model: Any, name: str) -> bool:
    return bool(getattr(model, name, None))


def _offloads_what_is_captured(model: Any) -> bool:
    """Whether activations of the attention or the MLP are offloaded while CUDA graphs capture these by name."""
    captured = kind_of(model) == "transformer_engine" and {"attn", "mlp"} & {*modules_of(model)}
    return bool(captured) and _set(model, "fine_grained_activation_offloading")


NEEDS = (
    Need("2.3", ("rotary_interleaved", "apply_rope_fusion"),
         lambda model, ddp: _set(model, "rotary_interleaved") and _set(model, "apply_rope_fusion")
         and not _set(model, "multi_latent_attention"),
         "model.config.apply_rope_fusion=False"),
    Need("2.3", ("fp8_param",), lambda model, ddp: _set(model, "fp8_param") and ddp.use_megatron_fsdp,
         "trainer.plugins.fp8_param_gather=False, or strategy.fsdp=None"),
    Need("2.6", ("cuda_graph_impl",), lambda model, ddp: kind_of(model) in ("local", "transformer_engine"),
         "model.config.cuda_graph_impl='none'"),
    Need("2.7", ("cuda_graph_impl", "cross_entropy_fusion_impl"),
         lambda model, ddp: kind_of(model) == "full_iteration" and model.cross_entropy_loss_fusion
         and model.cross_entropy_fusion_impl == "te",
         "model.config.cross_entropy_fusion_impl='native'"),
    Need("2.8", ("softmax_type",),  # of its own attention, and not of the plain one
         lambda model, ddp: model.softmax_type != "vanilla" and not _set(model, "attn_logit_softcapping"),
         "model.config.softmax_type='vanilla'"),
    Need("2.8", ("use_transformer_engine_op_fuser",),
         lambda model, ddp: _set(model, "use_transformer_engine_op_fuser") and not model.gated_linear_unit,
         "model.config.use_transformer_engine_op_fuser=False"),
    Need("2.9", ("qk_clip",), lambda model, ddp: _set(model, "qk_clip"), "model.config.qk_clip=False"),
    Need("2.9", ("log_max_attention_logit",), lambda model, ddp: _set(model, "log_max_attention_logit"),
         "model.config.log_max_attention_logit=False"),
    Need("2.10", ("batch_invariant_mode",), lambda model, ddp: _set(model, "batch_invariant_mode"),
         "model.config.batch_invariant_mode=False"),
    Need("2.10", ("gradient_accumulation_fusion",),
         lambda model, ddp: ddp.use_megatron_fsdp and _set(model, "gradient_accumulation_fusion"),
         "model.config.gradient_accumulation_fusion=False"),
    Need("2.13", ("moe_router_fusion",),
         lambda model, ddp: _set(model, "moe_router_fusion") and model.moe_router_score_function == "sqrtsoftplus",
         "model.config.moe_router_fusion=False"),
    Need("2.14", ("use_grouped_gemm_for_shared_expert",),
         lambda model, ddp: _set(model, "use_grouped_gemm_for_shared_expert"),
         "model.config.use_grouped_gemm_for_shared_expert=False"),
    Need("2.14", ("use_grouped_gemm_for_dense_mlp",), lambda model, ddp: _set(model, "use_grouped_gemm_for_dense_mlp"),
         "model.config.use_grouped_gemm_for_dense_mlp=False"),
    Need("2.14", ("fine_grained_activation_offloading", "cuda_graph_impl"),
         lambda model, ddp: _offloads_what_is_captured(model), "model.config.cuda_graph_impl='none'"),
)  # fmt: skip


def refuse_an_older_transformer_engine(model: Any, ddp_config: Any, version: str) -> None:
    """Refuse settings that need a newer Transformer Engine than ``version``.

    Raises:
        ConfigError: there are such settings.
    """
    problems = []
    for need in NEEDS:
        if Version(version) < Version(need.since) and need.applies(model, ddp_config):
            settings = " with ".join(
                f"model.config.{name}={getattr(model, name)!r}{at(model, name)}" for name in need.fields
            )
            problems.append(
                f"{settings} requires Transformer Engine {need.since} or newer, but {version} is installed. Install a "
                f"newer version, or set {need.instead}."
            )
    if problems:
        raise ConfigError("\n".join(problems))
