# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) with correct gradients under tensor parallelism.

Megatron-Core's local layers shard the down-projections by columns and gather the result. The gradient of a gather is a
split, so the contributions of other ranks' heads to the shared rotary key are lost: single parameters were off by 0.1 %
to 100 % with tensor parallelism (0.16.1 and 0.19.2). Here every rank holds both down-projections whole, as with
Transformer Engine's layers, whose checkpoints have the same shapes. Under sequence parallelism each rank projects its
part of the sequence, and `finalize_model_grads` sums the weights' gradients, like those of norms.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer import multi_latent_attention as upstream
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.models.layers.rules import mla_problems, refuse


class LocalMLA(upstream.MLASelfAttention):
    """Multi-latent self-attention without Transformer Engine; called as Megatron-Core's `MLASelfAttention`.

    `q_lora_rank` None projects queries straight from the hidden states. `rope_type` is `"rope"` or `"yarn"`
    (arXiv:2309.00071). `naming` is what newer versions of Megatron-Core pass in addition.

    Raises:
        ConfigError: see `mla_problems`; above all, tensor parallelism needs sequence parallelism.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: upstream.MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
        **naming: Any,
    ):
        refuse(mla_problems(config))
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        # Not MLASelfAttention's own constructor, which accepts no other class for the down-projections.
        upstream.MultiLatentAttention.__init__(
            self,
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
            **naming,
        )
        heads, hidden, q_rank, kv_rank = (
            config.num_attention_heads,
            config.hidden_size,
            config.q_lora_rank,
            config.kv_lora_rank,
        )
        if q_rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, heads * self.q_head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden, q_rank, config=config)
            self.q_layernorm = self._norm(submodules.q_layernorm, q_rank)
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, q_rank, heads * self.q_head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, kv_rank + config.qk_pos_emb_head_dim, config=config)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, kv_rank)
        self.linear_kv_up_proj = self._up(
            submodules.linear_kv_up_proj, kv_rank, heads * (config.qk_head_dim + config.v_head_dim)
        )

    def _up(self, module: Any, input_size: int, output_size: int) -> Any:
        """A projection to the heads, which are shared out over the tensor-parallel ranks."""
        return build_module(
            module,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def _norm(self, module: Any, width: int) -> Any:
        return build_module(module, hidden_size=width, config=self.config, eps=self.config.layernorm_epsilon)


class MLAOfTransformerEngine(upstream.MLASelfAttention):
    """Megatron-Core's, with queries projected as they come where they have no latent (`q_lora_rank` None).

    From 0.19 on it norms them once more in front of `linear_q_proj`, behind the norm of the layer's input: parameters that no
    DeepSeek V2-Lite has, and other logits.
    """

    def _resolve_qk_norm_config(self, submodules: upstream.MLASelfAttentionSubmodules) -> Any:
        own: Any = super()
        return {**own._resolve_qk_norm_config(submodules), "linear_q_proj": submodules.linear_q_proj}


class ReplicatedLinear(torch.nn.Module):
    """`y = x W^T`, W `[output_size, input_size]` whole and the same on every tensor-parallel rank.

    Returns `(y, None)`, as Megatron-Core's linear layers do with their bias.
    """

    parallel_mode = "duplicated"
    """The value of Transformer Engine's corresponding layer, which adapters read."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig):
        super().__init__()
        # None lets a surrounding `with torch.device("meta")` decide, as in Megatron-Core's own layers.
        device = None if config.use_cpu_initialization else get_backend().device
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, device=device, dtype=config.params_dtype))
        if config.perform_initialization:
            assert config.init_method is not None, "TransformerConfig fills init_method"
            if config.use_cpu_initialization:
                config.init_method(self.weight)
            else:
                # The generator that is the same on all tensor-parallel ranks.
                tracker: Any = tensor_parallel.get_cuda_rng_tracker()
                with tracker.fork(get_data_parallel_rng_tracker_name()):
                    config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`x` is `[..., input_size]`."""
        return F.linear(x, self.weight), None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here; the schedules that delay them call every layer."""
