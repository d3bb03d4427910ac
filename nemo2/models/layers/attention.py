# SPDX-License-Identifier: Apache-2.0
"""Core attention on torch's scaled_dot_product_attention, with context parallelism.

Tensors in Megatron-Core's layout, sequence first: S query tokens, T key tokens, B micro-batch, N query heads, G
key/value heads (N is a multiple of G), D head width, E width of a value head; N and G are this tensor-parallel rank's
share.

Context parallelism. The sequence is cut into 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r, so that every
rank has the same amount of causal work (Megatron-Core's `get_batch_on_this_cp_rank`). Queries stay where they are; keys
and values are all-gathered and put back into the order of the sequence, and their gradients are reduce-scattered by
Megatron-Core's own autograd function. That is the communication of Transformer Engine's `cp_comm_type="all_gather"`;
the other types give the same numbers with other messages, so any of them is accepted.
"""

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo2.errors import ConfigError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_UNMASKED = (AttnMaskType.no_mask,)


class SDPAttention(MegatronModule):
    """softmax(Q K^T * scale) V, built and called as Megatron-Core's `DotProductAttention` is.

    `softmax_scale` None means 1 / sqrt(D). `apply_query_key_layer_scaling` divides and multiplies by the same number to
    keep fp16 scores in range; scores are kept in fp32 here, so it has nothing to do. Attention dropout draws from
    Megatron's model-parallel generator unless the sequence is split over the tensor-parallel ranks, as upstream.

    Raises:
        ConfigError: `config` asks for a sliding window, a learnable or off-by-one softmax, or QK clipping.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        k_channels: Optional[int] = None,
        v_channels: Optional[int] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
    ):
        super().__init__(config=config)
        del (
            attention_type,
            v_channels,
            cp_comm_type,
        )  # the shapes of the call say the first two; see above for the third
        _refuse_unsupported(config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        head_width = k_channels or config.kv_channels
        assert head_width is not None, "TransformerConfig fills kv_channels"
        self.softmax_scale = 1.0 / math.sqrt(head_width) if softmax_scale is None else softmax_scale
        self.cp_group = None
        if config.context_parallel_size > 1:
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self.cp_group = groups.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        attn_mask_type: Optional[AttnMaskType] = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params: Optional[PackedSeqParams] = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: `[S, B, N, D]`, this context-parallel rank's tokens.
            key: `[T, B, G, D]`, likewise.
            value: `[T, B, G, E]`, likewise.
            attention_mask: True where a token may **not** be attended to, broadcastable to `[B, 1, S, keys]`, where
                keys are those of the whole sequence, in order. None masks nothing. Added to a causal mask, not instead
                of it.
            attn_mask_type: overrides the one of the constructor; None keeps it. With `no_mask` the mask is ignored.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            `[S, B, N * E]`. A query that may attend to nothing gives zeros.

        Raises:
            ConfigError: a bias or packed sequences are passed.
        """
        if packed_seq_params is not None:
            raise ConfigError(
                "packed sequences need Transformer Engine's attention; use packed_sequence_size=-1 without it."
            )
        if attention_bias is not None:
            raise ConfigError(
                "attention_bias is not supported by SDPAttention; pass None, or install Transformer Engine."
            )
        mask_type = attn_mask_type or self.attn_mask_type
        causal = mask_type in _CAUSAL
        if mask_type in _UNMASKED:
            attention_mask = None

        q_BNSD, k_BGTD, v_BGTE = (x.permute(1, 2, 0, 3) for x in (query, *self._whole_sequence(key, value)))
        if self.cp_group is None:
            out_BNSE = self._attend(q_BNSD, k_BGTD, v_BGTE, attention_mask, first_query=_aligned(causal, query, key))
        else:
            out_BNSE = self._attend_chunks(q_BNSD, k_BGTD, v_BGTE, attention_mask, causal=causal)
        return out_BNSE.permute(2, 0, 1, 3).flatten(2)

    def _whole_sequence(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all context-parallel ranks, in the order of the sequence."""
        if self.cp_group is None:
            return key, value
        return _gather_in_order(key, self.cp_group), _gather_in_order(value, self.cp_group)

    def _attend_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Optional[Tensor], *, causal: bool
    ) -> Tensor:
        """Each of this rank's two chunks over the keys it may see: a causal chunk ends where its own tokens do."""
        assert self.cp_group is not None
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        chunk = q.size(2) // 2
        outputs = []
        for position, q_chunk in zip((rank, 2 * cp - 1 - rank), q.chunk(2, dim=2), strict=True):
            num_keys = (position + 1) * chunk if causal else k.size(2)
            mask = attention_mask
            if mask is not None:
                mask = mask.expand(*mask.shape[:2], q.size(2), k.size(2))
                rows = slice(0, chunk) if position == rank else slice(chunk, 2 * chunk)
                mask = mask[:, :, rows, :num_keys]
            first_query = num_keys - chunk if causal else None
            outputs.append(self._attend(q_chunk, k[:, :, :num_keys], v[:, :, :num_keys], mask, first_query=first_query))
        return torch.cat(outputs, dim=2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Optional[Tensor], *, first_query: Optional[int]
    ) -> Tensor:
        """`first_query` is the place of the first query among the keys; None leaves attention bidirectional."""
        num_queries, num_keys = q.size(2), k.size(2)
        arguments: dict[str, Any] = {"scale": self.softmax_scale, "enable_gqa": q.size(1) != k.size(1)}
        if attention_mask is None and first_query == 0 and num_queries == num_keys:
            arguments["is_causal"] = True  # lets torch pick a kernel that never makes the mask
        else:
            arguments["attn_mask"] = _allowed(attention_mask, first_query, num_queries, num_keys, device=q.device)
        arguments["dropout_p"] = self.dropout_p if self.training else 0.0
        if arguments["dropout_p"] == 0.0 or self.config.sequence_parallel:
            return F.scaled_dot_product_attention(q, k, v, **arguments)
        with tensor_parallel.get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]: made on demand
            return F.scaled_dot_product_attention(q, k, v, **arguments)


def _gather_in_order(x_S: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """`[S / cp, ...]` of every rank, as `[S, ...]`. The gradient of each rank's part is summed over the ranks."""
    gathered = tensor_parallel.gather_from_sequence_parallel_region(x_S, tensor_parallel_output_grad=True, group=group)
    cp = group.size()
    chunks = gathered.chunk(2 * cp, dim=0)
    # Chunk i of the sequence is the first half of rank i, or, from the middle on, the second half of rank 2cp - 1 - i.
    return torch.cat([chunks[2 * i] if i < cp else chunks[2 * (2 * cp - 1 - i) + 1] for i in range(2 * cp)])


def _aligned(causal: bool, query: Tensor, key: Tensor) -> Optional[int]:
    """Where the first query stands if the last query and the last key are the same token; None if not causal."""
    return key.size(0) - query.size(0) if causal else None


def _allowed(
    attention_mask: Optional[Tensor],
    first_query: Optional[int],
    num_queries: int,
    num_keys: int,
    *,
    device: torch.device,
) -> Optional[Tensor]:
    """What may be attended to (True), in the sense of scaled_dot_product_attention; None when everything may."""
    allowed = None if attention_mask is None else ~attention_mask.bool()
    if first_query is not None:
        causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(diagonal=first_query)
        allowed = causal if allowed is None else allowed & causal
    return allowed


def _refuse_unsupported(config: TransformerConfig) -> None:
    """A setting that would be ignored is an error instead."""
    rules = {
        "window_size": (None, "sliding windows"),
        "softmax_type": ("vanilla", "other softmax types"),
        "qk_clip": (False, "QK clipping"),
    }
    for name, (supported, what) in rules.items():
        value = getattr(config, name, supported)
        if value != supported:
            raise ConfigError(
                f"{name}={value!r}: {what} need Transformer Engine's attention, which is not in use here; "
                f"set {name}={supported!r}, or train on a GPU with Transformer Engine installed."
            )
