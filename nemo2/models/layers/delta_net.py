# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet, the linear attention of Qwen3-Next: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.

Parameters, their shards on tensor-parallel ranks and their names in checkpoints are those of Megatron-Core's layer, which
refuses to be built without flash-linear-attention (fla). This layer calls fla's kernel on a GPU that has it, and Megatron-Core's
formula in plain PyTorch elsewhere. Its norm of the output isn't centred on zero, as in Qwen3-Next, whatever the other norms are.
Letters: B batch, L length, K key heads, V value heads, D channels per head. All numbers of heads are those of this rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo2.backend import get_backend
from nemo2.backend.cuda import CudaBackend
from nemo2.backend.extras import why_missing
from nemo2.errors import ConfigError
from nemo2.models.layers.notices import say_once
from nemo2.models.layers.rules import delta_net_problems, refuse
from nemo2.models.layers.sections import stored_in_sections
from nemo2.models.walker import linear_attention_layers


def with_delta_nets(block: TransformerBlockSubmodules, config: Any, *, vp_stage: Optional[int]) -> Any:
    """A copy of a pipeline stage's block, with `GatedDeltaNet` as the attention of the layers with linear attention.

    Its projections have the classes of the attention that it replaces, so that the first one also normalizes its input where that
    attention's does.

    Raises:
        ConfigError: see `rules.delta_net_problems`.
    """
    refuse(delta_net_problems(config, tp=config.tensor_model_parallel_size, cp=config.context_parallel_size))
    linear = linear_attention_layers(config)
    layers: list[Any] = list(block.layer_specs or ())
    for position, layer_index in enumerate(_layers_of_stage(config, vp_stage)):
        if linear[layer_index]:
            layers[position] = _with_delta_net(layers[position])
    return dataclasses.replace(block, layer_specs=layers)


def _layers_of_stage(config: Any, vp_stage: Optional[int]) -> Sequence[int]:
    """The layers, from 0, of this rank's chunk."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))


def _with_delta_net(layer: Any) -> Any:
    parts = layer.submodules
    attention = parts.self_attention.submodules
    projections = GatedDeltaNetSubmodules(in_proj=attention.linear_qkv, out_proj=attention.linear_proj)
    names = {
        ours: theirs.replace("linear_qkv", "in_proj") for ours, theirs in parts.sharded_state_dict_keys_map.items()
    }
    replaced = dataclasses.replace(
        parts,
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=projections),
        sharded_state_dict_keys_map=names,
    )
    return dataclasses.replace(layer, submodules=replaced)


@dataclasses.dataclass
class GatedDeltaNetSubmodules:
    """The classes of the two projections."""

    in_proj: Any
    out_proj: Any


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


class GatedDeltaNet(MegatronModule):
    """Linear attention whose state forgets (alpha) and is corrected toward new values (beta).

    Input and output are ``[L, B, hidden_size]``, with ``L`` sharded over the ranks under sequence parallelism.
    """

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: Any,
        **_: Any,
    ):
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        tp = pg_collection.tp.size()
        self.key_heads, self.value_heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        self.keys = self.key_heads * config.linear_key_head_dim
        self.values = self.value_heads * config.linear_value_head_dim
        self.taps = config.linear_conv_kernel_dim
        self.convolved = {"query": self.keys, "key": self.keys, "value": self.values}
        self.projected = {**self.convolved, "z": self.values, "beta": self.value_heads, "alpha": self.value_heads}
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = _built(
            submodules.in_proj,
            config.hidden_size,
            tp * sum(self.projected.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.out_proj = _built(
            submodules.out_proj,
            tp * self.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        # None lets a surrounding `with torch.device("meta")` decide, as in Megatron-Core's own layers.
        device = None if config.use_cpu_initialization or config.init_model_with_meta_device else get_backend().device
        dtype, channels = config.params_dtype, sum(self.convolved.values())
        generators: Any = get_cuda_rng_tracker()
        with generators.fork():
            self.conv1d = nn.Conv1d(
                channels, channels, self.taps, groups=channels, bias=False, device=device, dtype=dtype
            )
            decay = torch.empty(self.value_heads, device=device).uniform_(1, 16).log()
        self.A_log = nn.Parameter(decay.to(dtype))
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, device=device, dtype=dtype))
        self.out_norm = GatedRMSNorm(
            config.linear_value_head_dim, eps=config.layernorm_epsilon, device=device, dtype=dtype
        )
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010  # pyright knows no such attribute
        self.in_proj.weight.partition_sizes = list(self.projected.values())

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        *,
        inference_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """With an inference context of static batches, continue from the state of the last call.

        Raises:
            ConfigError: packed sequences.
        """
        if packed_seq_params is not None:
            raise ConfigError("Gated DeltaNet layers don't support packed sequences: pad sequences instead.")
        context = inference_context or inference_params
        before, state = None, None
        if context is not None and context.sequence_len_offset:
            before, state = context.key_value_memory_dict[self.layer_number]
        projected, _ = self.in_proj(hidden_states)
        mixed, seen, state = self.mix(projected.transpose(0, 1), before, state, keep_state=context is not None)
        if context is not None:
            context.key_value_memory_dict[self.layer_number] = (seen, state)
        return self.out_proj(mixed.transpose(0, 1).contiguous())

    def mix(
        self, projected: Tensor, before: Optional[Tensor], state: Optional[Tensor], *, keep_state: bool
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """What happens between the projections: the output ``[B, L, V * D]``, and the last inputs of the convolution and the last
        state, which the next call takes as ``before`` and ``state``. None: the sequence starts here."""
        qkv, z, beta, alpha = projected.split(
            [sum(self.convolved.values()), self.values, self.value_heads, self.value_heads], dim=-1
        )
        seen = F.pad(qkv, [0, 0, self.taps - 1, 0]) if before is None else torch.cat([before, qkv], dim=1)
        convolved = F.silu(F.conv1d(seen.transpose(1, 2), self.conv1d.weight, groups=seen.size(2))).transpose(1, 2)
        query, key, value = convolved.split(list(self.convolved.values()), dim=-1)
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
        return mixed.flatten(2), seen[:, 1 - self.taps :], state

    def delta_rule(self, projected: Tensor) -> Any:
        """fla's kernel, or Megatron-Core's formula for deterministic runs and for machines without the kernel."""
        kernel = gated_delta_net.chunk_gated_delta_rule
        if kernel is not None and projected.is_cuda and not self.config.deterministic_mode:
            return kernel
        if kernel is None and isinstance(get_backend(), CudaBackend):
            say_once(
                "Gated DeltaNet layers run as plain PyTorch: right, but slow and hungry for memory, because "
                f"{why_missing('fla')}."
            )
        return gated_delta_net.torch_chunk_gated_delta_rule

    def backward_dw(self) -> None:
        """The gradients of the projections' weights, where they are computed apart (``delay_wgrad_compute``)."""
        self.out_proj.backward_dw()
        self.in_proj.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None, tp_group: Any = None
    ) -> dict[str, Any]:
        """The sharded state in Megatron-Core's form: tensors that concatenate several parts are saved part by part, so that the
        tensor-parallel size may change."""
        own = make_sharded_tensors_for_checkpoint(
            {
                **{name: getattr(self, name) for name in ("A_log", "dt_bias")},
                **self.conv1d.state_dict(prefix="conv1d.", keep_vars=True),
                **self.out_norm.state_dict(prefix="out_norm.", keep_vars=True),
            },
            prefix,
            dict.fromkeys(("A_log", "dt_bias", "conv1d.weight"), 0),
            sharded_offsets,
        )
        for name in ("in_proj", "out_proj"):
            own |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        for name, sections in (("conv1d.weight", self.convolved), ("in_proj.weight", self.projected)):
            own[prefix + name] = stored_in_sections(own[prefix + name], sections)
        return own


def _built(kind: Any, *sizes: int, **settings: Any) -> Any:
    from megatron.core.transformer.spec_utils import build_module

    return build_module(kind, *sizes, **settings)


def _normalized(x: Tensor) -> Tensor:
    """Each head's channels, scaled to length 1, as in fla's ``l2norm``."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
