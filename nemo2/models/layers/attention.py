# SPDX-License-Identifier: Apache-2.0
"""Core attention in plain PyTorch, with packed sequences, sliding windows, soft-capping, sinks and context parallelism.

Tensors have Megatron-Core's layout, sequence first: S query tokens, T key tokens, B micro-batch, N query heads, G
key/value heads (N is a multiple of G), D head width, E width of a value head. N and G are those of this tensor-parallel
rank.

`cp_comm_type` selects the kind of context parallelism (`chunks.py` defines which rank holds which tokens):

- `"all_gather"`, the default: queries stay, and keys and values are gathered. Megatron-Core's own autograd function
  reduce-scatters their gradients.
- `"p2p"`: ring attention (`ring.py`), which never holds more than two shards of keys and values.
- `"a2a"`: ranks exchange sequence for heads, attend over whole sequences with some of the heads, and exchange back
  (DeepSpeed-Ulysses, arXiv:2309.14509).

All give the same numbers. `"p2p"` and `"a2a"` don't support an individual mask per query, and `"p2p"` doesn't support
dropout. Such calls use the gather, which is reported once.
"""

import math
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.models.layers.attend import attend
from nemo2.models.layers.attention_rule import AttentionRule
from nemo2.models.layers.chunks import Span, by_rank, check_divisible, chunks_of, gather_in_order, in_order
from nemo2.models.layers.notices import say_once
from nemo2.models.layers.rules import attention_problems, refuse

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_NOTHING_OVERLAPS = (
    "model.config.cp_comm_type is not set, so the plain attention gathers keys and values before it starts, and the gather "
    "overlaps with nothing. 'p2p' sends keys and values around a ring while attention computes, but without PyTorch's fused "
    "kernel."
)


class SDPAttention(MegatronModule):
    """softmax(Q K^T * scale) V, built and called like Megatron-Core's `DotProductAttention`.

    `softmax_scale` None means 1 / sqrt(D). `apply_query_key_layer_scaling` divides and multiplies by the same number to
    keep fp16 scores in range; here scores are in fp32, so it has no effect. As in Megatron-Core, attention dropout
    draws from the model-parallel generator unless the sequence is split over the tensor-parallel ranks.

    From `config`: `window_size` (left, right) on the layers that `window_attn_skip_freq` does not leave out,
    `attn_logit_softcapping` (a field of nemo2; see `attend.AttentionRule`), and `softmax_type`: `"off-by-one"` adds a
    score of zero to each softmax, `"learnable"` one parameter per head, `softmax_offset` `[N]` (gpt-oss).

    Raises:
        ConfigError: `config` requests something that `attention_problems` lists.
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
        del attention_type, v_channels  # the shapes of the call say both
        refuse(attention_problems(config, cp_comm_type=cp_comm_type))
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        head_width = k_channels or config.kv_channels
        assert head_width is not None, "TransformerConfig fills kv_channels"
        self.softmax_scale = 1.0 / math.sqrt(head_width) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(
            config.window_size,
            config.window_attn_skip_freq,  # pyright: ignore[reportArgumentType]: None is looked at first
            self.layer_number,
        )
        self.window = config.window_size if windowed else None
        self.softcap = getattr(config, "attn_logit_softcapping", None)
        self.cp_comm_type = cp_comm_type or "all_gather"
        self.cp_group = None
        if config.context_parallel_size > 1:
            if cp_comm_type is None:
                say_once(_NOTHING_OVERLAPS)
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self.cp_group = groups.cp
        self.softmax_offset = self._build_softmax_offset(config)

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
            query: `[S, B, N, D]`, this context-parallel rank's tokens; `[S, N, D]` with `packed_seq_params`.
            key: `[T, B, G, D]`, likewise.
            value: `[T, B, G, E]`, likewise.
            attention_mask: True where a token may **not** be attended to, broadcastable to `[B, 1, S, keys]`, where
                keys are those of the whole sequence, in order. None masks nothing. Added to a causal mask, not instead
                of it.
            attn_mask_type: overrides the one of the constructor; None keeps it. With `no_mask` the mask is ignored.
            attention_bias: must be None.
            packed_seq_params: where sequences packed into one row begin and end (format `"thd"`); tokens see their own
                sequence only. None for one sequence per row. Where padded lengths are given they count: the padding
                behind a sequence is part of it, and causal attention keeps it out of the sight of real tokens.

        Returns:
            `[S, B, N * E]`; `[S, N * E]` where packed. A query that may attend to nothing gives zeros.

        Raises:
            ConfigError: a bias is passed, or packed sequences with a mask, without causal attention while padded, or in
                another format.
            DataError: a sequence cannot be split for context parallelism.
        """
        if attention_bias is not None:
            raise ConfigError(
                "attention_bias is not supported by SDPAttention; pass None, or install Transformer Engine."
            )
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type == AttnMaskType.no_mask:
            attention_mask = None
        rule = AttentionRule(
            causal=mask_type in _CAUSAL, scale=self.softmax_scale, window=self.window, softcap=self.softcap
        )
        cp = 1 if self.cp_group is None else self.cp_group.size()
        if packed_seq_params is None:
            sequences = [(0, max(query.size(0), key.size(0)) * cp)]
            return self._attend_sequences(query, key, value, rule, sequences, attention_mask)
        if attention_mask is not None:
            raise ConfigError(
                "An attention mask was passed with packed sequences, which define the mask themselves: pass "
                "attention_mask=None."
            )
        sequences = _sequences_of(packed_seq_params, query.size(0) * cp, causal=rule.causal)
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return self._attend_sequences(query, key, value, rule, sequences, None).squeeze(1)

    def _attend_sequences(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
        sequences: list[Span],
        attention_mask: Optional[Tensor],
    ) -> Tensor:
        """This rank's chunks of `sequences` over the keys of all ranks. `[S, B, N, D]` and so on to `[S, B, N * E]`."""
        if self.cp_group is None:
            return self._attend_chunks(query, key, value, rule, sequences, attention_mask)
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        check_divisible(sequences, cp)
        way = self._way(attention_mask)
        if way == "p2p":
            from nemo2.models.layers.ring import ring_attention

            q, k, v = (_heads_first(x) for x in (query, key, value))
            return _tokens_first(ring_attention(q, k, v, rule, sequences, self.cp_group, sink=self.softmax_offset))
        if way == "a2a":
            return self._attend_exchanged(query, key, value, rule, sequences, attention_mask)
        key, value = (gather_in_order(x, sequences, self.cp_group) for x in (key, value))
        return self._attend_chunks(query, key, value, rule, sequences, attention_mask, cp=cp, rank=rank)

    def _way(self, attention_mask: Optional[Tensor]) -> str:
        """The method by which the context-parallel ranks exchange keys and values in this call."""
        beyond = None
        if self.cp_comm_type in ("p2p", "a2a") and attention_mask is not None and attention_mask.size(-2) > 1:
            beyond = "a mask with a row per query"
        elif self.cp_comm_type == "p2p" and attention_mask is not None:
            beyond = "an attention mask"
        elif self.cp_comm_type == "p2p" and self.dropout_p > 0.0 and self.training:
            beyond = "attention dropout"
        if beyond is None:
            return self.cp_comm_type
        say_once(f"cp_comm_type={self.cp_comm_type!r} runs as 'all_gather', because the call has {beyond}.")
        return "all_gather"

    def _attend_chunks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
        sequences: list[Span],
        attention_mask: Optional[Tensor],
        *,
        cp: int = 1,
        rank: int = 0,
        sink: Optional[Tensor] = None,
    ) -> Tensor:
        """Attention of the queries that `rank` holds over all keys and values."""
        q, k, v = (_heads_first(x) for x in (query, key, value))
        outputs = []
        for chunk in chunks_of(sequences, cp, rank):
            start, end = sequences[chunk.sequence]
            queries, keys, mask = q[:, :, chunk.places], k[:, :, start:end], attention_mask
            if mask is not None and mask.size(2) > 1:
                mask = mask[:, :, chunk.places]
            output = attend(
                queries,
                keys,
                v[:, :, start:end],
                rule,
                # With a cache there are fewer queries than keys. The last query and the last key are the same token.
                first_query=chunk.position if cp > 1 else keys.size(2) - queries.size(2),
                forbidden=mask,
                sink=self.softmax_offset if sink is None else sink,
                dropout_p=self.dropout_p if self.training else 0.0,
                dropout_context=None if self.config.sequence_parallel else _model_parallel_rng,
            )
            outputs.append(output)
        return _tokens_first(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))

    def _attend_exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
        sequences: list[Span],
        attention_mask: Optional[Tensor],
    ) -> Tensor:
        """Whole sequences with a share of the heads, between two exchanges."""
        assert self.cp_group is not None
        cp, rank = self.cp_group.size(), self.cp_group.rank()

        def with_some_heads(x: Tensor) -> Tensor:
            by_head = x.unflatten(2, (cp, -1)).movedim(2, 0).flatten(0, 1)
            return in_order(tensor_parallel.all_to_all(self.cp_group, by_head.contiguous()), sequences, cp)

        sink = None if self.softmax_offset is None else self.softmax_offset.chunk(cp)[rank]
        query, key, value = (with_some_heads(x) for x in (query, key, value))
        out = self._attend_chunks(query, key, value, rule, sequences, attention_mask, sink=sink)
        back = tensor_parallel.all_to_all(self.cp_group, by_rank(out, sequences, cp))
        return back.unflatten(0, (cp, -1)).movedim(0, 2).flatten(2)

    def _build_softmax_offset(self, config: TransformerConfig) -> Optional[Tensor]:
        if config.softmax_type == "vanilla":
            return None
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        # None lets a surrounding `with torch.device("meta")` decide, as in Megatron-Core's own layers.
        device = None if config.use_cpu_initialization else get_backend().device
        offset = torch.zeros(num_heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return offset
        offset = torch.nn.Parameter(offset)
        tensor_parallel.set_tensor_model_parallel_attributes(offset, True, 0, 1)
        if config.perform_initialization and config.init_method is not None and not config.use_cpu_initialization:
            with _model_parallel_rng():
                config.init_method(offset)
        return offset

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict] = None
    ) -> dict[str, Any]:
        """The learnable softmax offset, sharded by heads over the tensor-parallel ranks; otherwise nothing."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def _model_parallel_rng() -> AbstractContextManager[None]:
    return tensor_parallel.get_cuda_rng_tracker().fork()  # pyright: ignore[reportOptionalMemberAccess]: made on demand


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    """`[B, N, S, E]` to `[S, B, N * E]`."""
    return x.permute(2, 0, 1, 3).flatten(2)


def _sequences_of(params: PackedSeqParams, num_tokens: int, *, causal: bool) -> list[Span]:
    """Start and end of every sequence of a pack; what follows the last is one more, so that every token has its own."""
    if params.qkv_format != "thd":
        raise ConfigError(
            f"packed_seq_params.qkv_format={params.qkv_format!r}: packed sequences need the format 'thd'."
        )
    padded = params.cu_seqlens_q_padded
    lengths = params.cu_seqlens_q if padded is None else padded
    if padded is not None and not causal and not torch.equal(padded, params.cu_seqlens_q):
        raise ConfigError(
            "Packed sequences with padding between them need causal attention, in which no token attends to the padding "
            "after it. Pack the sequences without padding, or use a causal mask type."
        )
    ends = lengths.tolist()
    if ends[-1] < num_tokens:
        ends.append(num_tokens)
    return [(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True) if end > start]
