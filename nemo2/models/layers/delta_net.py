# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet, the linear attention of Qwen3-Next: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.

Parameters, their shards on tensor-parallel ranks and their names in checkpoints are those of Megatron-Core's layer, which
refuses to be built without flash-linear-attention (fla). This layer calls fla's kernel on a GPU that has it, and Megatron-Core's
formula in plain PyTorch elsewhere. Its norm of the output isn't centred on zero, as in Qwen3-Next, whatever the other norms are.
Letters: B batch, L length, K key heads, V value heads, D channels per head. All numbers of heads are those of this rank.
"""

import dataclasses
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from nemo2.base.backend import get_backend
from nemo2.base.backend.extras import why_missing
from nemo2.models.layers.notices import say_once
from nemo2.models.layers.recurrent import Projections, RecurrentMixer
from nemo2.models.layers.rules import delta_net_problems, refuse
from nemo2.models.walker import linear_attention_layers


def with_delta_nets(block: TransformerBlockSubmodules, config: Any, *, vp_stage: Optional[int]) -> Any:
    """A copy of a pipeline stage's block, with `GatedDeltaNet` as the attention of the layers with linear attention.

    Its projections have the classes of the attention that it replaces, so that the first one also normalizes its input where that
    attention's does.

    Raises:
        ConfigError: see `rules.delta_net_problems`.
    """
    refuse(delta_net_problems(config, tp=config.tensor_model_parallel_size, cp=config.context_parallel_size))
    linear, first = linear_attention_layers(config), get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = [
        _with_delta_net(layer) if linear[index] else layer for index, layer in enumerate(block.layer_specs or (), first)
    ]
    return dataclasses.replace(block, layer_specs=layers)


def _with_delta_net(layer: Any) -> Any:
    parts = layer.submodules
    attention = parts.self_attention.submodules
    projections = Projections(in_proj=attention.linear_qkv, out_proj=attention.linear_proj)
    names = {
        ours: theirs.replace("linear_qkv", "in_proj") for ours, theirs in parts.sharded_state_dict_keys_map.items()
    }
    replaced = dataclasses.replace(
        parts,
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=projections),
        sharded_state_dict_keys_map=names,
    )
    return dataclasses.replace(layer, submodules=replaced)


class GatedRMSNorm(nn.Module):
    """An RMSNorm of each head's channels, times SiLU of a gate.

    All heads share the weight, and each tensor-parallel rank has some of the heads, so the gradients of the ranks are added.
    """

    def __init__(self, width: int, *, eps: float, device: Any, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor, *, tp_group: Any) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=tp_group)
        normed = F.rms_norm(x.float(), (x.size(-1),), eps=self.eps)
        return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(RecurrentMixer):
    """Linear attention whose state forgets (alpha) and is corrected toward new values (beta)."""

    kind = "Gated DeltaNet layers"
    sharded = ("A_log", "dt_bias", "conv1d.weight")

    def __init__(
        self,
        config: Any,
        submodules: Projections,
        layer_number: int,
        *,
        pg_collection: Any,
        **_: Any,
    ):
        tp = pg_collection.tp.size()
        keys = config.linear_num_key_heads // tp * config.linear_key_head_dim
        values = config.linear_num_value_heads // tp * config.linear_value_head_dim
        heads = config.linear_num_value_heads // tp
        convolved = {"query": keys, "key": keys, "value": values}
        projected = {**convolved, "z": values, "beta": heads, "alpha": heads}
        super().__init__(
            config,
            submodules,
            layer_number,
            pg_collection=pg_collection,
            hidden_size=config.hidden_size,
            projected=tp * sum(projected.values()),
            mixed=tp * values,
        )
        self.key_heads, self.value_heads = config.linear_num_key_heads // tp, heads
        self.values, self.conv_size = values, config.linear_conv_kernel_dim
        self.conv_parts, self.projected_parts = convolved, projected
        # None lets a surrounding `with torch.device("meta")` decide, as in Megatron-Core's own layers.
        device = None if config.use_cpu_initialization or config.init_model_with_meta_device else get_backend().device
        dtype, channels = config.params_dtype, sum(convolved.values())
        generators: Any = get_cuda_rng_tracker()
        with generators.fork():
            self.conv1d = nn.Conv1d(
                channels, channels, self.conv_size, groups=channels, bias=False, device=device, dtype=dtype
            )
            decay = torch.empty(self.value_heads, device=device).uniform_(1, 16).log()
        self.A_log = nn.Parameter(decay.to(dtype))
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, device=device, dtype=dtype))
        self.out_norm = GatedRMSNorm(
            config.linear_value_head_dim, eps=config.layernorm_epsilon, device=device, dtype=dtype
        )
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010  # pyright knows no such attribute
        self.in_proj.weight.partition_sizes = list(projected.values())

    def mix(
        self, projected: Tensor, inputs: Optional[Tensor], state: Optional[Tensor], *, keep_state: bool
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """As in `RecurrentMixer`. The output is ``[B, L, V * D]``."""
        qkv, z, beta, alpha = projected.split(
            [sum(self.conv_parts.values()), self.values, self.value_heads, self.value_heads], dim=-1
        )
        inputs = F.pad(qkv, [0, 0, self.conv_size - 1, 0]) if inputs is None else torch.cat([inputs, qkv], dim=1)
        convolved = F.silu(self.conv1d(inputs.transpose(1, 2))).transpose(1, 2)
        query, key, value = convolved.split(list(self.conv_parts.values()), dim=-1)
        query, key = (_normalized(x.unflatten(-1, (self.key_heads, -1))) for x in (query, key))
        repeats = self.value_heads // self.key_heads
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
        mixed, state = self.delta_rule(projected)(
            query.contiguous(),
            key.contiguous(),
            value.unflatten(-1, (self.value_heads, -1)).contiguous(),
            g=decay,
            beta=beta.sigmoid().contiguous(),
            initial_state=state,
            output_final_state=keep_state,
        )
        mixed = self.out_norm(mixed, z.unflatten(-1, (self.value_heads, -1)), tp_group=self.tp_group)
        return mixed.flatten(2), inputs[:, 1 - self.conv_size :], state

    def delta_rule(self, projected: Tensor) -> Any:
        """fla's kernel, or Megatron-Core's formula for deterministic runs and for machines without the kernel."""
        kernel = gated_delta_net.chunk_gated_delta_rule
        if kernel is not None and projected.is_cuda and not self.config.deterministic_mode:
            return kernel
        if kernel is None and get_backend().name == "cuda":
            say_once(
                "Gated DeltaNet layers run as plain PyTorch: right, but slow and hungry for memory, because "
                f"{why_missing('fla')}."
            )
        return gated_delta_net.torch_chunk_gated_delta_rule

    def backward_dw(self) -> None:
        """The gradients of the projections' weights, where they are computed apart (``delay_wgrad_compute``)."""
        self.out_proj.backward_dw()
        self.in_proj.backward_dw()

    def sections(self) -> dict[str, dict[str, int]]:
        return {"conv1d.weight": self.conv_parts, "in_proj.weight": self.projected_parts}


def _normalized(x: Tensor) -> Tensor:
    """Each head's channels, scaled to length 1, as in fla's ``l2norm``."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
