# SPDX-License-Identifier: Apache-2.0
"""Which classes a GPT's layers are built from.

Transformer Engine's where it can run, otherwise Megatron-Core's local layers with the norm and the attention of this
folder, which also work with sequence and context parallelism. Both return the whole block of the current pipeline stage
rather than one layer, because only a block names the class of its final norm.
"""

import dataclasses
import functools
from typing import Any, Optional

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.backend.extras import have_te, why_missing
from nemo2.errors import ConfigError
from nemo2.models.layers.attention import SDPAttention
from nemo2.models.layers.norm import TorchNorm


def layer_spec(config: TransformerConfig, *, vp_stage: Optional[int] = None) -> ModuleSpec:
    """Transformer Engine's layers on a GPU that has it, `local_layer_spec` anywhere else.

    vp_stage: which of this rank's virtual pipeline chunks to describe; None without a virtual pipeline.

    Raises:
        ConfigError: see `local_layer_spec`.
    """
    if not have_te():
        return local_layer_spec(config, vp_stage=vp_stage)
    _require_vp_stage(config, vp_stage)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=True,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    return ModuleSpec(module=TransformerBlock, submodules=block)


def local_layer_spec(config: TransformerConfig, *, vp_stage: Optional[int] = None) -> ModuleSpec:
    """Dense GPT layers that need neither Transformer Engine nor Apex, on any device.

    Raises:
        ConfigError: `config` describes layers that have no plain PyTorch counterpart here, or a virtual pipeline, and
            `vp_stage` does not say which chunk of it.
    """
    _refuse_unsupported(config)
    _require_vp_stage(config, vp_stage)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    return ModuleSpec(module=TransformerBlock, submodules=_with_plain_layers(block))


def _replacements() -> dict[Any, type]:
    table: dict[Any, type] = {WrappedTorchNorm: TorchNorm, DotProductAttention: SDPAttention}
    try:
        # What the local spec names for LayerNorm where Apex is installed.
        from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    except ImportError:
        return table
    return table | {FusedLayerNorm: TorchNorm}


def _with_plain_layers(spec: Any) -> Any:
    """A copy of a finished spec with classes exchanged wherever they stand.

    Specs are nested dataclasses, lists and (from 0.19) partials; the local spec builders take no provider of classes.
    """
    table = _replacements()

    def exchange(node: Any) -> Any:
        if isinstance(node, type):
            return table.get(node, node)
        if isinstance(node, list):
            return [exchange(item) for item in node]
        if isinstance(node, functools.partial):
            return functools.partial(
                exchange(node.func), *map(exchange, node.args), **{k: exchange(v) for k, v in node.keywords.items()}
            )
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            changes = {
                field.name: exchange(getattr(node, field.name)) for field in dataclasses.fields(node) if field.init
            }
            return dataclasses.replace(node, **changes)
        return node

    return exchange(spec)


def _require_vp_stage(config: TransformerConfig, vp_stage: Optional[int]) -> None:
    if config.virtual_pipeline_model_parallel_size is not None and vp_stage is None:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size} cuts this rank's "
            "layers into chunks; pass vp_stage, the chunk to describe."
        )


def _refuse_unsupported(config: TransformerConfig) -> None:
    te = why_missing("transformer_engine")
    if config.num_moe_experts:
        raise ConfigError(f"num_moe_experts={config.num_moe_experts}: only dense layers are built without TE ({te}).")
    if config.multi_latent_attention:
        # Upstream's local layers give wrong gradients with tensor parallelism: they split where they should also sum.
        raise ConfigError(f"multi_latent_attention=True is not supported without TE ({te}).")
