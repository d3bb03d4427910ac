# SPDX-License-Identifier: Apache-2.0
"""The classes that a GPT's layers are built from.

Transformer Engine's where it can run, otherwise Megatron-Core's local layers with the norm, attention and experts of this
folder, which also work with every parallelism. Both return the whole block of the current pipeline stage rather than one
layer, because only a block names the class of its final norm, and because layers may differ (dense and experts mixed).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Optional

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from nemo2.base.backend import get_backend
from nemo2.base.backend.extras import have_te
from nemo2.base.errors import ConfigError
from nemo2.models.layers.attention import SDPAttention
from nemo2.models.layers.norm import KeyNormOverHeads, QueryNormOverHeads, TorchNorm
from nemo2.models.layers.notices import say_once
from nemo2.models.layers.rules import (
    best_of_group_needs_plain_router,
    experts_have_no_post_norm,
    layer_problems,
    mla_problems,
    refuse,
)


def layer_spec(config: TransformerConfig, *, vp_stage: Optional[int] = None) -> ModuleSpec:
    """Transformer Engine's layers on a GPU with Transformer Engine, `local_layer_spec` elsewhere.

    The rest follows from `config`: experts (`num_moe_experts`, and `moe_layer_freq` for the layers with experts),
    `multi_latent_attention`, `qk_layernorm`, and nemo2's fields `post_sublayer_layernorm` and `attn_logit_softcapping`.
    Soft-capped attention is `SDPAttention` on GPUs too, because Transformer Engine has none.

    `vp_stage` selects this rank's virtual pipeline chunk. None: there is no virtual pipeline.

    Raises:
        ConfigError: see `local_layer_spec`.
    """
    if not have_te():
        if cost := get_backend().plain_layers():
            say_once(cost)
        return local_layer_spec(config, vp_stage=vp_stage)
    refuse([*mla_problems(config), *best_of_group_needs_plain_router(config), *experts_have_no_post_norm(config)])
    block = _with_norms(_block(config, use_transformer_engine=True, vp_stage=vp_stage), config)
    return completed(ModuleSpec(module=TransformerBlock, submodules=block), config)


def changed_layer_spec(
    config: TransformerConfig, change: Callable[[Any, int], None], *, vp_stage: Optional[int] = None
) -> ModuleSpec:
    """`layer_spec` with changed layers.

    Args:
        change: It gets the submodules of each layer of this pipeline stage, a copy of its own, and the layer's number,
            counted from 1 over all stages.

    Raises:
        ConfigError: see `local_layer_spec`.
    """
    spec: Any = copy.deepcopy(layer_spec(config, vp_stage=vp_stage))
    layers = [copy.deepcopy(layer) for layer in spec.submodules.layer_specs]
    for number, layer in enumerate(layers, start=get_transformer_layer_offset(config, vp_stage=vp_stage) + 1):
        change(layer.submodules, number)
    spec.submodules.layer_specs = layers
    return spec


def local_layer_spec(config: TransformerConfig, *, vp_stage: Optional[int] = None) -> ModuleSpec:
    """GPT layers that need neither Transformer Engine nor Apex, on any device.

    Raises:
        ConfigError: `config` describes layers that have no plain PyTorch counterpart here (`rules.layer_problems`), or a
            virtual pipeline, and `vp_stage` does not say which chunk of it.
    """
    refuse(layer_problems(config))
    # The local spec's grouped experts need a CUDA extension in 0.16. nemo2's replace the sequential ones.
    sequential = copy.copy(config)
    sequential.moe_grouped_gemm = False
    block = _with_norms(_block(sequential, use_transformer_engine=False, vp_stage=vp_stage), config)
    return ModuleSpec(module=TransformerBlock, submodules=exchanged(block, _replacements(config)))


def mtp_block_spec(config: TransformerConfig, spec: ModuleSpec, *, vp_stage: Optional[int] = None) -> Any:
    """The multi-token prediction layers of this pipeline stage, made like the last layer of `spec`, a block's; None where
    `config.mtp_num_layers` is not set or the stage has none.

    Raises:
        ConfigError: `spec` is not that of a block.
    """
    if not getattr(config, "mtp_num_layers", None):
        return None
    block = spec.submodules
    if not isinstance(block, TransformerBlockSubmodules):
        raise ConfigError(
            f"model.config.mtp_num_layers={config.mtp_num_layers} needs a transformer_layer_spec of a whole block. Build it with "
            "nemo2.models.layers.spec.layer_spec, or set model.config.mtp_num_layers=None."
        )
    if not block.layer_specs:
        # A separate stage for the loss holds no decoder layer to copy, so the last layer of the whole model is used.
        whole = copy.copy(config)
        whole.pipeline_model_parallel_size, whole.virtual_pipeline_model_parallel_size = 1, None
        whole.pipeline_model_parallel_layout = None
        built: Any = layer_spec(whole).submodules
        block = dataclasses.replace(block, layer_specs=built.layer_specs[-1:])
    local = not have_te()
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=not local, vp_stage=vp_stage)
    return exchanged(mtp, _replacements(config)) if local and mtp is not None else mtp


def completed(spec: Any, config: TransformerConfig) -> Any:
    """A copy of a spec of Transformer Engine's layers, with the features that they lack for `config`."""
    from megatron.core.extensions import transformer_engine as te

    table: dict[Any, Any] = {}
    if config.multi_latent_attention:
        from nemo2.models.layers.mla import MLAOfTransformerEngine

        table[MLASelfAttention] = MLAOfTransformerEngine
    if getattr(config, "attn_logit_softcapping", None) is not None:
        table[te.TEDotProductAttention] = SDPAttention
    if not getattr(config, "pre_sublayer_layernorm", True):
        table[te.TELayerNormColumnParallelLinear] = te.TEColumnParallelLinear
    if getattr(config, "post_sublayer_layernorm", False):
        from nemo2.models.layers.post_norm import with_post_norm

        linear: Any = te.TERowParallelLinear
        table[linear] = with_post_norm(linear)
    return exchanged(spec, table)


def _block(
    config: TransformerConfig, *, use_transformer_engine: bool, vp_stage: Optional[int]
) -> TransformerBlockSubmodules:
    if config.virtual_pipeline_model_parallel_size is not None and vp_stage is None:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size} splits this rank's layers "
            "into chunks: pass vp_stage, the index of the chunk."
        )
    # From 0.19 on, this spec builder refuses variants.
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    block = get_gpt_decoder_block_spec(
        plain,
        use_transformer_engine=use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    if config.experimental_attention_variant == "gated_delta_net":
        from nemo2.models.layers.delta_net import with_delta_nets

        return with_delta_nets(block, config, vp_stage=vp_stage)
    return block


def _with_norms(block: TransformerBlockSubmodules, config: Any) -> TransformerBlockSubmodules:
    """`block` without norms in front of sub-layers (``pre_sublayer_layernorm=False``), and with norms of queries and keys
    over all heads (``qk_layernorm_over_heads``)."""
    over_heads = getattr(config, "qk_layernorm_over_heads", False)
    if getattr(config, "pre_sublayer_layernorm", True) and not over_heads:
        return block
    layers: Any = copy.deepcopy(block.layer_specs)
    for layer in layers:
        parts: Any = layer.submodules
        if over_heads:
            attention = parts.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = QueryNormOverHeads, KeyNormOverHeads
        if not getattr(config, "pre_sublayer_layernorm", True):
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    return dataclasses.replace(block, layer_specs=layers)


def _replacements(config: TransformerConfig) -> dict[Any, Any]:
    table: dict[Any, Any] = {WrappedTorchNorm: TorchNorm, DotProductAttention: SDPAttention}
    if config.multi_latent_attention:
        from nemo2.models.layers.mla import LocalMLA

        table[MLASelfAttention] = LocalMLA
    if config.num_moe_experts:
        from nemo2.models.layers.experts import LocalExperts, TorchGroupedMLP

        table[SequentialMLP] = TorchGroupedMLP if config.moe_grouped_gemm else LocalExperts
    if getattr(config, "post_sublayer_layernorm", False):
        from nemo2.models.layers.post_norm import with_post_norm

        table[RowParallelLinear] = with_post_norm(RowParallelLinear)
    try:
        # The local spec's name for LayerNorm where Apex is installed.
        from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    except ImportError:
        return table
    return table | {FusedLayerNorm: TorchNorm}


def row_parallel_linears() -> list[Any]:
    """The classes of the last projections of attention and feed-forward that a spec on this machine may have."""
    if not have_te():
        return [RowParallelLinear]
    from megatron.core.extensions import transformer_engine as te

    return [RowParallelLinear, te.TERowParallelLinear]


def exchanged(spec: Any, table: dict[Any, Any], *, keep: Collection[str] = ()) -> Any:
    """A copy of a finished spec with classes exchanged wherever they stand, except in the fields ``keep``.

    Specs are nested dataclasses, lists and (from 0.19) partials; the local spec builders take no provider of classes.
    """
    if isinstance(spec, type):
        return table.get(spec, spec)
    if isinstance(spec, list):
        return [exchanged(item, table, keep=keep) for item in spec]
    if isinstance(spec, functools.partial):
        arguments = [exchanged(item, table, keep=keep) for item in spec.args]
        keywords = {name: exchanged(item, table, keep=keep) for name, item in spec.keywords.items()}
        return functools.partial(exchanged(spec.func, table, keep=keep), *arguments, **keywords)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = [field.name for field in dataclasses.fields(spec) if field.init and field.name not in keep]
        return dataclasses.replace(spec, **{name: exchanged(getattr(spec, name), table, keep=keep) for name in fields})
    return spec
