# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 layers in plain PyTorch: right on any device, slow, and hungry for memory.

For machines without mamba-ssm, causal-conv1d and Transformer Engine; Megatron-Core's own mixer can't even be imported
without Triton. Parameters, their shards on tensor-parallel ranks and their names in checkpoints are those of its mixer.
Letters: B batch, L length, H heads, P channels per head, G groups, N states.
"""

import dataclasses
import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import mamba_block
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerLayerSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from torch import Tensor, nn

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.models.layers.norm import TorchNorm
from nemo2.models.layers.recurrent import Projections, RecurrentMixer
from nemo2.models.layers.spec import _replacements, exchanged

# 0.19 renamed it, and 0.16 knows only the old name.
_Stack: Any = getattr(mamba_block, "HybridStack", None) or mamba_block.MambaStack
_StackSubmodules: Any = getattr(mamba_block, "HybridStackSubmodules", None) or mamba_block.MambaStackSubmodules

_CONV_SIZE = 4
"""The tokens that the convolution before the scan covers, including the current token."""


def selective_scan(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, *, state: Optional[Tensor] = None, chunk: int = 128
) -> tuple[Tensor, Tensor]:
    """``y_t = c_t h_t`` of the recurrence ``h_t = exp(dt_t decay) h_(t-1) + dt_t b_t x_t``, as ``[B, L, H, P]``, and its last
    state, ``[B, H, N, P]``.

    ``x`` ``[B, L, H, P]``, ``dt`` ``[B, L, H]``, ``decay`` ``[H]`` (negative), ``b`` and ``c`` ``[B, L, G, N]``, each group
    for ``H / G`` heads; ``state``: the one before the first step, None for zeros. Within a chunk as masked attention, between
    chunks by their states: Dao and Gu 2024, arXiv:2405.21060, section 6. Memory grows with ``L * chunk``.
    """
    length, heads = x.size(1), x.size(2)
    chunk = min(chunk, length)
    b, c = (t.repeat_interleave(heads // t.size(2), dim=2) for t in (b, c))
    # Steps of size zero at the end neither decay nor add.
    x, dt, b, c = (F.pad(t, [0, 0] * (t.dim() - 2) + [0, -length % chunk]) for t in (x, dt, b, c))
    x, dt, b, c = (t.unflatten(1, (-1, chunk)) for t in (x, dt, b, c))  # [B, chunks, chunk, H, ...]
    inputs = x * dt.unsqueeze(-1)
    log_decay = (dt * decay).cumsum(dim=2)  # since the chunk's start
    apart = log_decay.unsqueeze(3) - log_decay.unsqueeze(2)  # [B, chunks, to, from, H]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    weights = apart.masked_fill(~causal[..., None], -torch.inf).exp()
    within = torch.einsum("bztsh,bzthn,bzshn,bzshp->bzthp", weights, c, b, inputs)
    to_end = (log_decay[:, :, -1:] - log_decay).exp()
    added = torch.einsum("bzsh,bzshn,bzshp->bzhnp", to_end, b, inputs)
    state, before = torch.zeros_like(added[:, 0]) if state is None else state, []
    for index in range(added.size(1)):
        before.append(state)
        state = state * log_decay[:, index, -1].exp()[..., None, None] + added[:, index]
    between = torch.einsum("bzth,bzthn,bzhnp->bzthp", log_decay.exp(), c, torch.stack(before, dim=1))
    return (within + between).flatten(1, 2)[:, :length], state


class GroupedRMSNorm(nn.Module):
    """RMSNorm over groups of ``group_size`` channels; statistics in fp32."""

    def __init__(self, hidden_size: int, *, group_size: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = 1e-5
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (-1, self.group_size))
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.flatten(-2).to(x.dtype) * self.weight


class TorchMambaMixer(RecurrentMixer):
    """A Mamba 2 mixer with the parameters, the initial values and the checkpoint format of Megatron-Core's.

    Each tensor-parallel rank has whole groups with their heads.

    Raises:
        ConfigError: heads or groups that the ranks can't share, or context parallelism.
    """

    kind = "Mamba layers without mamba-ssm"
    sharded = ("A_log", "dt_bias", "D", "conv1d.weight", "conv1d.bias", "norm.weight")

    def __init__(
        self,
        config: Any,
        submodules: Projections,
        d_model: int,
        pg_collection: Any,
        layer_number: int = 1,
        **_: Any,
    ):
        tp, groups, states = pg_collection.tp.size(), config.mamba_num_groups, config.mamba_state_dim
        heads = config.mamba_num_heads or 2 * d_model // config.mamba_head_dim
        inner = heads * config.mamba_head_dim
        _check(config, heads, tp)
        super().__init__(
            config,
            submodules,
            layer_number,
            pg_collection=pg_collection,
            hidden_size=d_model,
            projected=2 * inner + 2 * groups * states + heads,  # z x b c dt
            mixed=inner,
        )
        self.heads, self.groups = heads // tp, groups // tp
        self.inner, self.states = inner // tp, groups // tp * states
        device, dtype = get_backend().device, config.params_dtype
        channels = self.inner + 2 * self.states
        generators: Any = get_cuda_rng_tracker()
        with generators.fork():
            self.conv1d = nn.Conv1d(channels, channels, _CONV_SIZE, groups=channels, device=device, dtype=dtype)
            steps = torch.exp(torch.empty(self.heads, device=device).uniform_(math.log(0.001), math.log(0.1)))
            # The inverse of softplus.
            self.dt_bias = nn.Parameter((steps + torch.log(-torch.expm1(-steps))).to(dtype))
            self.A_log = nn.Parameter(torch.empty(self.heads, device=device).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.heads, device=device))
        self.norm = GroupedRMSNorm(self.inner, group_size=self.inner // self.groups, device=device, dtype=dtype)
        for parameter in (*self.conv1d.parameters(), *self.norm.parameters(), self.dt_bias, self.A_log, self.D):
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010  # pyright knows no such attribute
        self.in_proj.weight.partition_sizes = list(self.sections()["in_proj.weight"].values())

    def mix(
        self, projected: Tensor, inputs: Optional[Tensor], state: Optional[Tensor], *, keep_state: bool
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """As in `RecurrentMixer`. The output is ``[B, L, H * P]``."""
        z, xbc, dt = projected.split([self.inner, self.inner + 2 * self.states, self.heads], dim=-1)
        inputs = F.pad(xbc, [0, 0, _CONV_SIZE - 1, 0]) if inputs is None else torch.cat([inputs, xbc], dim=1)
        xbc = F.silu(self.conv1d(inputs.transpose(1, 2))).transpose(1, 2)
        x, b, c = xbc.float().split([self.inner, self.states, self.states], dim=-1)
        x, b, c = (t.unflatten(-1, (n, -1)) for t, n in ((x, self.heads), (b, self.groups), (c, self.groups)))
        steps = F.softplus(dt.float() + self.dt_bias.float())
        y, state = selective_scan(x, steps, -self.A_log.float().exp(), b, c, state=state)
        y = y + x * self.D.float()[:, None]
        gated = (y.flatten(-2) * F.silu(z.float())).to(projected.dtype)
        return self.norm(gated), inputs[:, 1 - _CONV_SIZE :], state

    def sections(self) -> dict[str, dict[str, int]]:
        parts = {"x": self.inner, "B": self.states, "C": self.states}
        whole = {"z": self.inner, **parts, "dt": self.heads}
        return {"conv1d.weight": parts, "conv1d.bias": parts, "in_proj.weight": whole}


def _check(config: Any, heads: int, tp: int) -> None:
    groups = config.mamba_num_groups
    if heads % groups or groups % tp:
        raise ConfigError(
            f"Mamba layers with {heads} heads and model.config.mamba_num_groups={groups} can't be sharded with "
            f"strategy.tensor_model_parallel_size={tp}: the tensor-parallel size must divide the groups, and the groups must "
            "divide the heads."
        )
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"strategy.context_parallel_size={config.context_parallel_size}: Mamba layers without mamba-ssm need whole "
            "sequences. Set strategy.context_parallel_size=1, or train on a GPU with mamba-ssm and causal-conv1d."
        )


class TorchHybridStack(_Stack):
    """Megatron-Core's stack of mixers, feed-forward blocks and attention, with a final norm in plain PyTorch."""

    def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **kwargs: Any):
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = TorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


def torch_stack_spec(config: Any) -> ModuleSpec:
    """The layers of a hybrid model that need neither Transformer Engine nor Mamba's kernels.

    Parameters have the names that Transformer Engine's layers give them in checkpoints.
    """
    replaced = _replacements(config)
    layer: Any = exchanged(get_gpt_layer_local_spec(normalization=config.normalization), replaced)
    whole = layer.submodules
    names = whole.sharded_state_dict_keys_map
    # Only whether there are experts counts here, and those are built one by one or grouped as the configuration says.
    routed: Any = exchanged(
        get_gpt_layer_local_spec(num_experts=1, normalization=config.normalization), replaced
    ).submodules
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=routed.pre_mlp_layernorm, mlp=routed.mlp, mlp_bda=routed.mlp_bda
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
        sharded_state_dict_keys_map=names,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=whole.mlp,
        mlp_bda=whole.mlp_bda,
        sharded_state_dict_keys_map=names,
    )
    bias_dropout_add: Any = get_bias_dropout_add  # a function where the annotation says module
    projections = Projections(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = MambaLayerSubmodules(
        norm=TorchNorm,
        mixer=ModuleSpec(module=TorchMambaMixer, submodules=projections),
        mamba_bda=bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    return ModuleSpec(
        module=TorchHybridStack,
        submodules=_StackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mixer),
            attention_layer=dataclasses.replace(layer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=dataclasses.replace(layer, submodules=experts),
            **_predictions(),
        ),
    )


def _predictions() -> dict[str, Any]:
    """The projection and norms of additional predictions, whose layers a pattern has. Empty before Megatron-Core 0.19."""
    if "mtp_block_spec" not in {field.name for field in dataclasses.fields(_StackSubmodules)}:
        return {}
    of_pattern: Any = None
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=TorchNorm, hnorm=TorchNorm, eh_proj=ColumnParallelLinear, mtp_model_layer=of_pattern, layer_norm=TorchNorm
    )
    layers = [ModuleSpec(module=MultiTokenPredictionLayer, submodules=parts)]
    blocks = MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    return {"mtp_block_spec": ModuleSpec(module=MultiTokenPredictionBlock, submodules=blocks)}
