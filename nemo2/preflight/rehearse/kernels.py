# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a GPU's fused kernels, with the kernels' saved tensors and arithmetic.

Without Transformer Engine the model is built from `nemo2.models.layers`, whose plain PyTorch layers save other tensors
for the backward than the job's kernels. A stand-in replaces each operation that is one kernel on the GPU. It computes
nothing. It allocates the kernel's outputs, saves the tensors that the kernel saves, and reports the kernel's arithmetic
and messages:

- Norms save their input and a statistic per token, as Transformer Engine's norms do. The next linear layer saves its own
  input.
- Attention saves queries, keys, values, its output and one fp32 number per head and token, but no scores
  (FlashAttention-2, arXiv:2307.08691, section 3). Context parallelism communicates by Transformer Engine's ring, gather
  or all-to-all.
- Rotary embedding saves nothing if ``apply_rope_fusion`` selects the fused kernel.
- Dropout saves one byte per element.
- OpenAI's GELU, which Megatron-Core compiles, saves its input. `squared_relu` saves the same with and without
  compilation.
- Transformer Engine's cross entropy overwrites the logits with their gradient and saves nothing else.
- Grouped experts read their weights in place and save the input of each product. Activation and routing weights are one
  kernel.
- Routing is balanced: every expert gets an equal share of the tokens.
- Gated DeltaNet's rule saves its inputs and the products within chunks of 64 tokens (fla, ``chunk_gated_delta_rule``).
- Mamba's convolution and scan save their input and one state per chunk (mamba-ssm, ``mamba_split_conv1d_scan_combined``).

Soft-capped attention has no stand-in, because the plain layer runs on GPUs too (`nemo2.models.layers.spec`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nemo2.base.backend import cpu_patches
from nemo2.base.backend.extras import OLDEST_TE
from nemo2.base.backend.patching import Patch
from nemo2.base.backend.te_stub import FusedAdam
from nemo2.base.variables import replaced
from nemo2.config.provenance import record_of
from nemo2.preflight.rehearse import tracker as tracking

# Letters as in `nemo2.models.layers.attention`: S and T tokens, B micro-batch, N heads, G groups of keys, D and E widths.


class Kernel(torch.autograd.Function):
    """An operation: ``run(*tensors) -> (outputs, saved tensors)``. Each input that requires a gradient gets one."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Optional[Callable[[], None]], *tensors: Any) -> Any:
        outputs, saved = run(*tensors)
        ctx.save_for_backward(*saved)
        ctx.back = back
        ctx.shapes = [(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in tensors]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors  # the kernel reads these tensors, so they are alive while it runs
        if ctx.back is not None:
            ctx.back()
        del saved
        wanted = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                torch.empty(shape[0], dtype=shape[1], device=gradients[0].device) if needed and shape else None
                for needed, shape in zip(wanted, ctx.shapes, strict=True)
            ),
        )


def _apply(run: Callable[..., Any], *tensors: Any, back: Optional[Callable[[], None]] = None) -> Any:
    """The outputs of a `Kernel`. ``back`` is called in its backward."""
    return Kernel.apply(run, back, *tensors)


def _requested(config: Any, name: str) -> Any:
    """The requested value in a model's configuration, before this machine's backend changed it."""
    steps = record_of(config).steps.get(name)
    return steps[0].value if steps else getattr(config, name, None)


def _like(tensor: Tensor, shape: Sequence[int], dtype: Optional[torch.dtype] = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


# ------------------------------------------------------------------------------------------------- norms and rope


def _norm(module: Any, x: Tensor) -> Tensor:
    def run(x: Tensor, *parameters: Tensor) -> Any:
        statistics = 1 if module.is_rms else 2
        return _like(x, x.shape, module.weight.dtype), [x, _like(x, (statistics, *x.shape[:-1]), torch.float32)]

    parameters = [module.weight] if module.bias is None else [module.weight, module.bias]
    return _apply(run, x, *parameters)


def _grouped_norm(module: Any, x: Tensor) -> Tensor:
    def run(x: Tensor, weight: Tensor) -> Any:
        groups = x.shape[-1] // module.group_size
        return _like(x, x.shape), [x, _like(x, (*x.shape[:-1], groups), torch.float32)]

    return _apply(run, x, module.weight)


def _rope(original: Callable[..., Any], t: Tensor, freqs: Tensor, config: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not _requested(config, "apply_rope_fusion") or config.multi_latent_attention:
        return original(t, freqs, config, *args, **kwargs)
    return _apply(lambda t: (_like(t, t.shape), [freqs]), t)


# ------------------------------------------------------------------------------------------------- attention


def _attention(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    attn_mask_type: Any = None,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
) -> Tensor:
    if module.softcap is not None or packed_seq_params is not None or attention_bias is not None:
        return original(module, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
    return _flash(module, query, key, value, attn_mask_type or module.attn_mask_type)


def _flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask_type: Any) -> Tensor:
    from nemo2.models.layers.attention import _CAUSAL

    tokens, batch, heads, width = query.shape
    group = module.cp_group
    ranks = 1 if group is None else group.size()
    keys = key.size(0) * ranks
    left = keys if module.window is None or module.window[0] < 0 else min(module.window[0] + 1, keys)
    pairs = _pairs(tokens * ranks, keys, left, causal=mask_type in _CAUSAL) // ranks
    flops = 2 * batch * heads * pairs * (width + value.size(3))
    # Transformer Engine's default is the ring.
    style = module.cp_comm_type if getattr(module.config, "cp_comm_type", None) is not None else "p2p"
    style = style if ranks > 1 else "none"

    def run(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Any:
        # Transformer Engine's layouts need contiguous tensors. Values arrive as a view of the fused tensor.
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = _like(q, (tokens, batch, heads * v.size(3)))
        extra = _exchanged_forward(style, group, q, k, v, out)
        tracking.add_flops("attention", flops)
        del extra
        return out, [q, k, v, out, _like(q, (batch, heads, tokens), torch.float32)]

    shapes = query.shape, key.shape, value.shape
    empty = functools.partial(torch.empty, dtype=query.dtype, device=query.device)

    def back() -> None:
        # This closure refers to no tensor, because the tensor would live as long as the graph. The backward recomputes the
        # scores, so it has five products of the same size where the forward has two.
        tracking.add_flops("attention", flops * 5 // 2)
        _exchanged_backward(style, group, *shapes, empty)

    sink = [] if module.softmax_offset is None else [module.softmax_offset]
    return _apply(run, query, key, value, *sink, back=back)


def _pairs(queries: int, keys: int, left: int, *, causal: bool) -> int:
    """The number of query-key pairs that are not masked."""
    if not causal:
        return queries * min(keys, left)
    full = min(left, keys)
    return full * (full + 1) // 2 + max(0, queries - full) * full


def _exchanged_forward(style: str, group: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    """The workspace of the kernel, apart from its inputs and its output."""
    if style == "none":
        return []
    ranks = group.size()
    both = (*k.shape[:-1], k.size(3) + v.size(3))
    if style == "p2p":
        held = [_like(k, both)]
        for _ in range(ranks - 1):
            held.append(_message(group, "send_receive", _like(k, both)))
        # Partial outputs of the steps, merged at the end.
        return [*held, *(_like(out, out.shape) for _ in range(ranks - 1))]
    if style == "all_gather":
        return [_message(group, "all_gather", _like(k, (ranks * both[0], *both[1:])))]
    return [_message(group, "all_to_all", _like(x, x.shape)) for x in (q, k, v, out)]


def _exchanged_backward(style: str, group: Any, q: Any, k: Any, v: Any, empty: Callable[..., Tensor]) -> None:
    """``q``, ``k`` and ``v`` are shapes."""
    if style == "none":
        return
    ranks = group.size()
    both = (*k[:-1], k[3] + v[3])
    if style == "p2p":
        for _ in range(ranks - 1):
            _message(group, "send_receive", empty((2, *both)))  # keys and values, and their gradients
    elif style == "all_gather":
        _message(group, "all_gather", empty((ranks * both[0], *both[1:])))
        _message(group, "reduce_scatter", empty((ranks * both[0], *both[1:])))
    else:
        for shape in (q, k, v, (*q[:3], v[3])):
            _message(group, "all_to_all", empty(shape))


def _message(group: Any, kind: str, buffer: Tensor) -> Tensor:
    group._done(kind, buffer)
    return buffer


# ------------------------------------------------------------------------------------------------- dropout, loss


def _dropout(
    original: Callable[..., Any], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if input.device.type != "meta" or not training or p == 0.0:
        return original(input, p, training, inplace)
    return _apply(lambda x: (_like(x, x.shape), [_like(x, x.shape, torch.bool)]), input)


def _te_cross_entropy(logits: Tensor, labels: Tensor, group: Any, *_: Any, **__: Any) -> Tensor:
    """The loss per token, ``[S, B]`` in fp32, of ``logits`` ``[S, B, V / tp]``."""

    def run(x: Tensor) -> Any:
        if group.size() > 1:
            _message(group, "all_gather", _like(x, (group.size(), *x.shape[:2], 3), torch.float32))
        return _like(x, x.shape[:2], torch.float32), [x]

    return _InPlaceLoss.apply(run, logits)  # pyright: ignore[reportReturnType]


def _compiled_loss(original: Callable[..., Any], values: Tensor, *rest: Any) -> Any:
    """A step of Megatron-Core's fused loss whose in-place operations write a new tensor, as torch.compile has them do.

    Beside bf16 logits the loss and its gradient take 4.0 times their bytes, and 2.0 times without torch.compile: torch 2.15's
    allocator, by its own account. On an H100 (torch 2.11) the peak was 4.3 GiB above the count without this copy, which has 3.9.
    """
    return original(values.clone(), *rest)


class _InPlaceLoss(torch.autograd.Function):
    """A loss whose gradient overwrites its input."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: Tensor) -> Tensor:
        out, saved = run(x)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.saved_tensors[0].detach()


# ------------------------------------------------------------------------------------------------- experts


def _grouped_product(module: Any, x: Tensor, layer: str, ends: Tensor) -> Tensor:
    weights = [getattr(expert, layer).weight for expert in module.local_experts]
    width = weights[0].size(0)
    flops = 2 * x.size(0) * x.size(1) * width

    def run(x: Tensor, *weights: Tensor) -> Any:
        tracking.add_flops("grouped_gemm", flops)
        return _like(x, (x.size(0), width)), [x, *weights]

    return _apply(run, x, *weights, back=functools.partial(tracking.add_flops, "grouped_gemm", 2 * flops))


def _weighted_activation(
    original: Callable[..., Any], module: Any, h: Tensor, bias: Optional[Tensor], weights: Tensor
) -> Tensor:
    """Activation and routing weights in one kernel, as in Megatron-Core with ``bias_activation_fusion``."""
    config = module.config
    if bias is not None or not config.bias_activation_fusion:
        return original(module, h, bias, weights)
    width = h.size(-1) // (2 if config.gated_linear_unit else 1)
    return _apply(lambda h, w: (_like(h, (h.size(0), width)), [h, w]), h, weights)


def _biased_activation(
    original: Callable[..., Any], x: Tensor, bias: Optional[Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Megatron-Core's compiled bias and gated activation, ``[..., 2 * ffn]`` to ``[..., ffn]``."""
    biases = [] if bias is None else [bias]
    return _apply(lambda x, *b: (_like(x, (*x.shape[:-1], x.shape[-1] // 2)), [x, *b]), x, *biases)


def _compiled_activation(original: Callable[..., Any], x: Tensor) -> Tensor:
    """A function of one tensor that Megatron-Core compiles on GPUs. On CPUs it runs uncompiled and saves every
    intermediate result."""
    return _apply(lambda x: (_like(x, x.shape), [x]), x)


_selected: list[int] = []
"""The number of elements that a meta mask selects, innermost call last. A mask on meta has no values to count."""


def _permute(
    original: Callable[..., Any],
    tokens: Tensor,
    routing_map: Tensor,
    probs: Any = None,
    num_out_tokens: Any = None,
    **options: Any,
) -> Any:
    """The sort of tokens by expert, with a known number of outputs. The number depends on the routing map, which has no
    values on meta."""
    if routing_map.device != tokens.device:
        routing_map = torch.empty_like(routing_map, device=tokens.device)
    number = None if num_out_tokens is None else int(num_out_tokens)
    _selected.append(number if number is not None else tokens.size(0))
    try:
        return original(tokens, routing_map, probs=probs, num_out_tokens=number, **options)
    finally:
        _selected.pop()


def _masked_select(original: Callable[..., Any], self: Tensor, mask: Tensor) -> Tensor:
    """``masked_select`` on meta, whose mask doesn't determine the number of results. Autograd saves the input and the
    mask."""
    if not self.is_meta:
        return original(self, mask)
    number = _selected[-1] if mask.is_meta else int(mask.sum())
    kept = torch.empty_like(mask, device=self.device)
    return _apply(lambda x: (_like(x, (number,)), [x, kept]), self)


def _sort_chunks(
    original: Callable[..., Any],
    input: Tensor,
    split_sizes: Any,
    sorted_idxs: Any,
    probs: Optional[Tensor] = None,
    fused: bool = False,
) -> Any:
    """The sort of tokens from their order of arrival to the order of the experts, or back: one kernel with one copy."""

    def copied(x: Tensor) -> Any:
        return _apply(lambda x: (_like(x, x.shape), []), x)

    return copied(input), None if probs is None else copied(probs)


def _balanced(routing_map: Tensor, chosen: int) -> Tensor:
    """A routing map on the CPU in place of ``routing_map``, ``[tokens, experts]``, that assigns tokens to experts
    round-robin."""
    tokens, experts = routing_map.shape
    with _disable_current_modes():  # the tracker counts the job's tensors, and a job makes no such map
        picks = torch.arange(tokens * chosen, device="cpu").reshape(tokens, chosen) % experts
        return torch.zeros(tokens, experts, dtype=torch.bool, device="cpu").scatter_(1, picks, True)


def _preprocess(original: Callable[..., Any], dispatcher: Any, routing_map: Tensor) -> Tensor:
    """The dispatcher's counts of tokens per rank and expert, computed from balanced routing on the CPU instead of meta."""
    balanced = _balanced(routing_map, dispatcher.config.moe_router_topk)
    with replaced(cpu_patches, _CPU=torch.device("cpu")):
        return original(dispatcher, balanced)


def _gathered(original: Callable[..., Any], dispatcher: Any, hidden_states: Tensor, probs: Tensor) -> Any:
    """Balanced routing for the dispatcher that gathers all tokens, which reads the local experts' tokens from its routing
    map."""
    dispatcher.routing_map = _balanced(dispatcher.routing_map, dispatcher.config.moe_router_topk)
    return original(dispatcher, hidden_states, probs)


# ------------------------------------------------------------------------------------------------- Mamba


def _mamba(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A mixer whose convolution, scan and gate are one kernel between the two projections."""
    projected, _ = module.in_proj(hidden_states)
    length, batch, _ = projected.shape
    heads, states, width = module.heads, module.states // module.groups, module.inner // module.heads
    chunk = 128
    flops = 2 * batch * length * heads * (chunk * (states + width) // 2 + 2 * states * width)

    def run(projected: Tensor, *parameters: Tensor) -> Any:
        tracking.add_flops("scan", flops)
        out = _like(projected, (length, batch, module.inner))
        states_of_chunks = _like(projected, (batch, -(-length // chunk), heads, width, states), torch.float32)
        return out, [projected, out, states_of_chunks]

    parameters = [*module.conv1d.parameters(), module.dt_bias, module.A_log, module.D]
    back = functools.partial(tracking.add_flops, "scan", 2 * flops)
    return module.out_proj(module.norm(_apply(run, projected, *parameters, back=back)))


def _delta_rule(module: Any, projected: Tensor) -> Callable[..., Any]:
    """fla's kernel, which works in chunks of 64 tokens and computes what lies between them again in the backward."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> Any:
        batch, length, heads, keys = query.shape
        values, chunk = value.size(-1), 64
        flops = 2 * batch * length * heads * (3 * keys * values + chunk * (3 * keys + 2 * values) // 2)

        def run(*tensors: Tensor) -> Any:
            tracking.add_flops("scan", flops)
            within = _like(query, (batch, length, heads, chunk))
            return _like(value, value.shape), [*tensors, within]

        return _apply(
            run, query, key, value, g, beta, back=functools.partial(tracking.add_flops, "scan", 3 * flops)
        ), None

    return kernel


# ------------------------------------------------------------------------------------------------- the table


def te_kernels() -> tuple[Patch, ...]:
    """The stand-ins, for `rehearsing(patches=...)`."""
    layers, why = "nemo2.models.layers", "a GPU runs this as one kernel, which saves less"
    fusions, moe = "megatron.core.fusions", "megatron.core.transformer.moe"
    replacements = {
        f"{layers}.norm:TorchNorm.forward": _norm,
        f"{layers}.experts:TorchGroupedMLP._product": _grouped_product,
        f"{layers}.mamba:TorchMambaMixer.forward": _mamba,
        f"{layers}.mamba:GroupedRMSNorm.forward": _grouped_norm,
        f"{layers}.delta_net:GatedDeltaNet.delta_rule": _delta_rule,
    }
    wrappers = {
        f"{layers}.attention:SDPAttention.forward": _attention,
        f"{layers}.experts:LocalExperts._activate": _weighted_activation,
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb": _rope,
        "torch.nn.functional:dropout": _dropout,
        f"{fusions}.fused_cross_entropy:calculate_predicted_logits": _compiled_loss,
        f"{fusions}.fused_cross_entropy:calculate_gradients": _compiled_loss,
        f"{fusions}.fused_bias_swiglu:bias_swiglu_impl": _biased_activation,
        f"{fusions}.fused_bias_geglu:bias_geglu_impl": _biased_activation,
        "megatron.core.transformer.utils:gelu_impl": _compiled_activation,
        f"{moe}.moe_utils:sort_chunks_by_idxs": _sort_chunks,
    }
    adam = {
        "megatron.core.optimizer:Adam": FusedAdam,
        "megatron.core.optimizer.distrib_optimizer:Adam": FusedAdam,
        "megatron.core.utils:get_te_version": lambda: Version(OLDEST_TE),
    }
    return (
        *(Patch(target=target, replacement=kernel, why=why) for target, kernel in replacements.items()),
        *(Patch(target=target, replacement=wrapper, wraps=True, why=why) for target, wrapper in wrappers.items()),
        Patch(
            target="megatron.core.models.common.language_module.language_module:te_parallel_cross_entropy",
            replacement=_te_cross_entropy,
            may_be_absent=True,
            why=why,
        ),
        Patch(
            target="megatron.core.tensor_parallel.random:_get_share_storage",
            replacement=lambda: tracking.share,
            may_be_absent=True,
            why="on a GPU a discarded output shares the storage of the recomputed one, from Megatron-Core 0.17 on",
        ),
        *routing(),
        *(
            Patch(target=target, replacement=replacement, why="the job has Transformer Engine's FusedAdam")
            for target, replacement in adam.items()
        ),
    )


def routing() -> tuple[Patch, ...]:
    """The stand-ins that a rehearsal of experts needs with any ``kernels``."""
    moe = "megatron.core.transformer.moe"
    wrappers = {
        f"{moe}.moe_utils:permute": _permute,
        f"{moe}.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess": _preprocess,
        f"{moe}.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_postprocess": _gathered,
        "torch:Tensor.masked_select": _masked_select,
    }
    why = "where tokens go depends on their values"
    return tuple(Patch(target=target, replacement=one, wraps=True, why=why) for target, one in wrappers.items())


def _cpu_attention(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention kernel that torch selects on a CPU. For meta tensors torch selects the unfused formula, which saves
    scores."""
    one_width = query.size(-1) == key.size(-1) == value.size(-1)
    if not query.is_meta or dropout_p > 0.0 or not one_width:
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def plain_kernels() -> tuple[Patch, ...]:
    """Patches for rehearsals with the plain PyTorch layers: only operations without a counterpart on meta."""
    attention = "torch.nn.functional:scaled_dot_product_attention"
    why = "torch chooses another kernel for meta tensors"
    return (Patch(target=attention, replacement=_cpu_attention, wraps=True, why=why), *routing())
