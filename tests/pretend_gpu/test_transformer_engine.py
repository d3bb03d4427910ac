# SPDX-License-Identifier: Apache-2.0
"""The values that Transformer Engine's functions get on pretend GPUs, against torch and Megatron-Core. Needs no Transformer
Engine: what fills its results is called with results and arguments in its order."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo2.base.backend.extras import have_te

pytestmark = pytest.mark.pretend_gpu

SBHD, BSHD = "NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD", "NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD"


@pytest.fixture(scope="module")
def fill() -> Callable[..., None]:
    """``fill(name, result, *arguments, **keywords)``: the results of the function ``name``, into the tensors of ``result``."""
    module: Any = importlib.import_module("support.pretend_gpu.transformer_engine")

    def call(name: str, *arguments: Any, **keywords: Any) -> None:
        with module.operators.below_autograd():
            module.VALUES[name](*arguments, **keywords)

    return call


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def gpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cuda()


def empty(*like: Tensor) -> list[Tensor]:
    return [torch.full_like(tensor, torch.nan, device="cuda") for tensor in like]


def same(gpu_tensors: list[Tensor], cpu_tensors: list[Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for ours, theirs in zip(gpu_tensors, cpu_tensors, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_and_their_gradients(fill, kind, centered):
    x, weight, bias = (drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(6, 8), (8,), (8,)]))
    gamma = weight + 1 if centered else weight
    y = F.rms_norm(x, (8,), gamma, 1e-5) if kind == "rmsnorm" else F.layer_norm(x, (8,), gamma, bias, 1e-5)
    parameters = [x, weight] if kind == "rmsnorm" else [x, weight, bias]
    gradient = drawn(6, 8, seed=9)
    gradients = list(torch.autograd.grad(y, parameters, gradient))
    [out, *gradients_ours], statistics = empty(y, *gradients), empty(x[:, 0], x[:, 0])
    settings = ([gpu(bias)] if kind == "layernorm" else []) + [1e-5, None, None, None, 0, centered]
    result = [out, statistics[0] if kind == "layernorm" else None, statistics[1]]
    fill(f"{kind}_fwd", result, gpu(x), gpu(weight), *settings)
    known = statistics if kind == "layernorm" else statistics[1:]
    fill(f"{kind}_bwd", gradients_ours, gpu(gradient), gpu(x), *known, gpu(weight), 0, centered)
    same([out, *gradients_ours], [y, *gradients], rtol=1e-4, atol=1e-5)


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Megatron-Core's form of a gated activation, in ``megatron.core.transformer.mlp``."""

    def activated(x: Tensor) -> Tensor:
        gate, linear = torch.chunk(x, 2, dim=-1)
        return function(gate) * linear

    return activated


def activations() -> dict[str, Callable[[Tensor], Tensor]]:
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import geglu
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    return {
        "gelu": torch.nn.GELU(approximate="tanh"),
        "silu": torch.nn.SiLU(),
        "relu": torch.nn.ReLU(),
        "srelu": squared_relu,
        "swiglu": swiglu,
        "geglu": geglu,
        "reglu": gated(torch.nn.ReLU()),
    }


@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "srelu", "swiglu", "geglu", "reglu"])
def test_activations_and_their_gradients(fill, name):
    x = drawn(5, 8).requires_grad_()
    y = activations()[name](x)
    gradient = drawn(*y.shape, seed=1)
    out, d_x = empty(y, x)
    fill(name, out, gpu(x), None)
    fill(f"d{name}", d_x, gpu(gradient), gpu(x), None)
    same([out, d_x], [y, *torch.autograd.grad(y, x, gradient)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"]
)
def test_softmax_and_its_gradient(fill, kind):
    scores = drawn(2, 3, 4, 4).requires_grad_()
    hidden = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    if kind == "scaled_masked":
        hidden[:, :, :, 3] = True
    elif "causal" in kind or "triang" in kind:
        hidden = hidden | torch.ones(4, 4, dtype=torch.bool).triu(1)
    y = (scores * 0.5).masked_fill(hidden, -10000.0 if kind == "scaled_masked" else -torch.inf).softmax(-1)
    gradient = drawn(*y.shape, seed=1)
    [out] = empty(y)
    mask = [gpu(hidden)] if kind == "scaled_masked" else []
    fill(f"{kind}_softmax_forward", out, gpu(scores), *mask, 0.5)
    in_place = gpu(gradient)
    fill(f"{kind}_softmax_backward", in_place, in_place, out, 0.5)
    same([out, in_place], [y, *torch.autograd.grad(y, scores, gradient)])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", ["NVTE_NO_MASK", "NVTE_CAUSAL_MASK"])
@pytest.mark.parametrize("layout", [SBHD, BSHD])
def test_fused_attention_and_its_gradients(fill, layout, mask, groups):
    heads_first = (1, 2, 0, 3) if layout == SBHD else (0, 2, 1, 3)
    back = (2, 0, 1, 3) if layout == SBHD else (0, 2, 1, 3)
    shape = (5, 2) if layout == SBHD else (2, 5)
    q, k, v = (drawn(*shape, heads, 8, seed=heads).requires_grad_() for heads in (4, 4 // groups, 4 // groups))
    qh, kh, vh = (part.permute(heads_first) for part in (q, k, v))
    y = F.scaled_dot_product_attention(qh, kh, vh, is_causal="CAUSAL" in mask, scale=0.3, enable_gqa=groups > 1)
    y = y.permute(back)
    gradient = drawn(*y.shape, seed=7)
    out, *gradients = empty(y, q, k, v)
    [statistics] = empty(torch.zeros(2, 4, 5, 1))
    operands = [gpu(part) for part in (q, k, v)]
    before: list[Any] = [5, 5, True, 0.3, 0.0, True, layout, layout, None, None, mask, None, (-1, -1), None, None, None]
    fill("fused_attn_fwd", [out, statistics], *before, *operands)
    before = [5, 5, 0.3, 0.0, True, layout, layout, layout, layout, None, None, None, mask, None, (-1, -1), None, None]
    fill("fused_attn_bwd", gradients, *before, None, None, *operands, out, gpu(gradient), None, [statistics])
    same([out, *gradients], [y, *torch.autograd.grad(y, (q, k, v), gradient)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", [SBHD, BSHD])
def test_rotary_embeddings_and_their_gradient_are_megatron_cores(fill, layout, interleaved):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    x = drawn(6, 2, 3, 8).requires_grad_()
    angles = drawn(6, 1, 1, 2, seed=1)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    y = _apply_rotary_pos_emb_bshd(x, angles, rotary_interleaved=interleaved)
    gradient = drawn(*y.shape, seed=2)
    d_x = torch.autograd.grad(y, x, gradient)[0]
    turn: Callable[[Tensor], Tensor] = (lambda t: t.transpose(0, 1).contiguous()) if layout == BSHD else (lambda t: t)
    out, back = empty(turn(y.detach()), turn(d_x))
    fill("fused_rope_forward", out, gpu(turn(x)), gpu(angles), None, layout, interleaved, None, 1, 0)
    fill("fused_rope_backward", back, gpu(turn(gradient)), gpu(angles), None, layout, interleaved, None, 1, 0)
    same([out, back], [turn(y), turn(d_x)])


@pytest.mark.parametrize(
    ("score_function", "pre_softmax", "groups", "scaling", "biased"),
    [("softmax", False, None, None, False), ("softmax", True, None, None, False), ("sigmoid", False, 4, 2.5, True)],
)
def test_routing_is_megatron_cores(fill, score_function, pre_softmax, groups, scaling, biased):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    logits, bias = drawn(7, 8), drawn(8, seed=1) if biased else None
    probabilities, routed = topk_routing_with_score_function(
        logits,
        2,
        use_pre_softmax=pre_softmax,
        num_groups=groups,
        group_topk=groups and 2,
        scaling_factor=scaling,
        score_function=score_function,
        expert_bias=bias,
    )[:2]
    ours, routed_ours, scores = empty(logits)[0], torch.zeros(7, 8, dtype=torch.bool, device="cuda"), empty(logits)[0]
    settings = (2, pre_softmax, groups, groups and 2, scaling, score_function)
    fill("fused_topk_with_score_function_fwd", [ours, routed_ours, scores], gpu(logits), *settings, bias)
    same([ours], [probabilities])
    assert torch.equal(routed_ours.cpu(), routed)


@pytest.mark.parametrize("decoupled", [0, 1])
def test_adam_is_torchs(fill, decoupled):
    parameter = drawn(4, 3).requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.05)
    ours, first, second = gpu(parameter), gpu(torch.zeros(4, 3)), gpu(torch.zeros(4, 3))
    for step in (1, 2, 3):
        parameter.grad = drawn(4, 3, seed=step)
        optimizer.step()
        tensors = [[gpu(parameter.grad)], [ours], [first], [second]]
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        fill("multi_tensor_adam", None, 65536, flag, tensors, 0.1, 0.8, 0.9, 1e-6, step, decoupled, 1, 0.05)
    same([ours], [parameter], rtol=1e-5, atol=1e-6)


def test_adam_with_remainders_has_the_main_parameters_of_adam(fill):
    """Which are what a checkpoint gets (`nemo2.mcore.optim.megatron`)."""
    from nemo2.mcore.optim.megatron import join_main_params, split_main_params

    main = drawn(40, 3).requires_grad_()
    optimizer = torch.optim.AdamW([main], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.05)
    ours, remainders = (gpu(half) for half in split_main_params(main.detach()))
    first, second = gpu(torch.zeros(40, 3)), gpu(torch.zeros(40, 3))
    for step in (1, 2, 3):
        main.grad = drawn(40, 3, seed=step)
        optimizer.step()
        tensors = [[gpu(main.grad)], [ours], [first], [second], [remainders]]
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        fill("multi_tensor_adam_param_remainder", None, 65536, flag, tensors, 0.1, 0.8, 0.9, 1e-6, step, 1, 1, 0.05)
    same([ours], [main.bfloat16()], rtol=1e-2, atol=1e-6)
    same([join_main_params(ours.cpu(), remainders.cpu())], [main], rtol=1e-5, atol=1e-6)


def test_norms_of_several_tensors_and_scaling_report_infinities(fill):
    tensors = [drawn(3, 4), drawn(5, seed=1)]
    total, each = empty(torch.zeros(1), torch.zeros(2))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    fill("multi_tensor_l2norm", [total, each], 65536, flag, [[gpu(one) for one in tensors]], True)
    same(
        [total, each],
        [torch.cat([one.flatten() for one in tensors]).norm()[None], torch.stack([t.norm() for t in tensors])],
    )
    targets = empty(*tensors)
    fill("multi_tensor_scale", None, 65536, flag, [[gpu(one) for one in tensors], targets], 0.25)
    same(targets, [one * 0.25 for one in tensors])
    assert flag.item() == 0
    fill("multi_tensor_scale", None, 65536, flag, [[gpu(torch.tensor([torch.inf]))], empty(torch.zeros(1))], 0.25)
    assert flag.item() == 1


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_eight_bits_hold_the_values_to_their_precision(fill, scaling):
    x = drawn(6, 4) * 20
    largest = x.abs().max()
    past = torch.tensor([448.0 / (4 * largest)])  # four times as much room as is needed

    class Float8CurrentScalingQuantizer(SimpleNamespace):
        pass

    quantizer = (Float8CurrentScalingQuantizer if scaling == "current" else SimpleNamespace)(
        scale=gpu(torch.ones(1) if scaling == "current" else past), amax=gpu(torch.zeros(1))
    )
    eight_bits = SimpleNamespace(
        _fp8_dtype=4,
        _scale_inv=gpu(torch.ones(1)),
        _data=torch.zeros(6, 4, dtype=torch.uint8, device="cuda"),
        _transpose=torch.zeros(4, 6, dtype=torch.uint8, device="cuda"),
        _transpose_invalid=False,
        _quantizer=quantizer,
    )
    fill("quantize", eight_bits, gpu(x), quantizer)
    [back] = empty(x)
    fill("dequantize", back, eight_bits, None)
    assert (back.cpu() - x).abs().max() <= largest / 16  # three bits of mantissa
    assert torch.equal(eight_bits._transpose.cpu(), eight_bits._data.cpu().t())
    assert quantizer.amax.item() == pytest.approx(largest.item())
    assert eight_bits._scale_inv.item() == pytest.approx((largest / 448 if scaling == "current" else 1 / past).item())


def in_blocks(shape: torch.Size, kind: str) -> SimpleNamespace:
    """Memory of a matrix in fp8 with a scale per block, as Transformer Engine allocates it."""
    rows, columns = shape

    def bytes_(*shape: int) -> Tensor:
        return torch.full(shape, 7, dtype=torch.uint8, device="cuda")

    def inverse(high: int, wide: int) -> Tensor:
        return torch.full((high, wide), 7.0, device="cuda")

    if kind.startswith("nvfp4"):
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        four = torch.kron(pair, pair)
        quantizer = SimpleNamespace(
            with_rht=kind == "nvfp4 turned", with_2d_quantization=kind == "nvfp4 squares", with_amax_reduction=False,
            rht_matrix=gpu(torch.kron(four, four) / 4),
        )  # fmt: skip
        return SimpleNamespace(
            _fp4_dtype=10, _quantizer=quantizer, _amax_rowwise=inverse(1, 1)[0], _amax_columnwise=inverse(1, 1)[0],
            _rowwise_data=bytes_(rows, columns // 2), _columnwise_data=bytes_(columns, rows // 2),
            _rowwise_scale_inv=bytes_(-(-rows // 128) * 128, -(-columns // 64) * 4),
            _columnwise_scale_inv=bytes_(-(-columns // 128) * 128, -(-rows // 64) * 4),
        )  # fmt: skip
    if kind == "mxfp8":
        padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 128) * 128
        return SimpleNamespace(
            _fp8_dtype=4, _quantizer=None, _with_gemm_swizzled_scales=False,
            _rowwise_data=bytes_(rows, columns), _columnwise_data=bytes_(rows, columns),
            _rowwise_scale_inv=bytes_(padded_rows, -(-columns // 128) * 4),
            _columnwise_scale_inv=bytes_(-(-rows // 128) * 4, padded_columns),
        )  # fmt: skip
    high, wide = -(-rows // 128), -(-columns // 128)
    squares = kind == "squares"
    return SimpleNamespace(
        _fp8_dtype=4, _quantizer=SimpleNamespace(amax_epsilon=0.0, force_pow_2_scales=True), _is_2D_scaled=squares,
        _rowwise_data=bytes_(rows, columns), _columnwise_data=bytes_(columns, rows),
        _rowwise_scale_inv=inverse(high, -(-wide // 4) * 4) if squares else inverse(wide, -(-rows // 4) * 4),
        _columnwise_scale_inv=inverse(wide, -(-high // 4) * 4) if squares else inverse(high, -(-columns // 4) * 4),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["mxfp8", "rows", "squares"])
def test_each_block_holds_its_values_to_its_own_precision(fill, kind):
    x = drawn(160, 192) * torch.logspace(-3, 3, 192)
    x[:32, :128] = 0
    both = in_blocks(x.shape, kind)
    fill("quantize", both, gpu(x), None)
    blocks = {"mxfp8": [(1, 32), (32, 1)], "rows": [(1, 128), (128, 1)], "squares": [(128, 128)] * 2}[kind]
    for name, other, (high, wide) in zip(("rowwise", "columnwise"), ("columnwise", "rowwise"), blocks, strict=True):
        one = SimpleNamespace(**{**vars(both), f"_{other}_data": None})
        [back] = empty(x)
        fill("dequantize", back, one, None)
        largest = F.max_pool2d(F.pad(x.abs(), (0, -192 % wide, 0, -160 % high))[None], (high, wide))[0]
        largest = largest.repeat_interleave(high, 0)[:160].repeat_interleave(wide, 1)[:, :192]
        # Three bits of mantissa, of a block whose largest value is at least half of what its scale could hold.
        assert ((back.cpu() - x).abs() <= x.abs() / 16 + largest / 2**14).all(), name


def test_parts_that_ranks_gathered_are_swapped_back(fill):
    parts = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    result = torch.full((3, 2, 4), 99, dtype=torch.uint8, device="cuda")
    fill("swap_first_dims", result, gpu(parts), out=None)
    assert torch.equal(result.cpu(), parts.transpose(0, 1))


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4 turned", "nvfp4 squares"])
def test_each_block_of_four_bits_holds_its_values_to_its_own_precision(fill, kind):
    x = drawn(160, 192) * torch.logspace(-1, 1, 192)
    both = in_blocks(x.shape, kind)
    fill("quantize", both, gpu(x), None)
    for other in ("columnwise", "rowwise"):
        [back] = empty(x)
        fill("dequantize", back, SimpleNamespace(**{**vars(both), f"_{other}_data": None}), None)
        assert ((back.cpu() - x).norm(dim=0) < 0.15 * x.norm(dim=0)).all()


@pytest.mark.skipif(not have_te(), reason="the reference is Transformer Engine's")
@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4 squares"])
def test_four_bits_are_those_of_transformer_engines_reference(fill, kind):
    from transformer_engine.pytorch.custom_recipes import quantization_ref_nvfp4 as reference  # pyright: ignore
    from transformer_engine.pytorch.custom_recipes.utils import Fp4Formats  # pyright: ignore

    x = drawn(160, 192) * torch.logspace(-3, 3, 192)
    ours = in_blocks(x.shape, kind)
    fill("quantize", ours, gpu(x), None)
    tile = (16, 16) if kind == "nvfp4 squares" else (1, 16)
    theirs = reference.NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=tile).quantize(x)
    assert torch.equal(ours._rowwise_data.cpu(), theirs.data) and torch.equal(
        ours._columnwise_data.cpu(), theirs.data_t
    )
    scales = ours._rowwise_scale_inv.cpu()[:160, :12]
    assert torch.equal(scales, theirs.scale.view(torch.uint8)[:160, :12])


@pytest.mark.parametrize("kind", ["mxfp8", "rows", "squares", "nvfp4", "nvfp4 turned", "nvfp4 squares"])
@pytest.mark.parametrize(("a_transposed", "b_transposed"), [(True, False), (False, False), (False, True)])
def test_products_of_blocks_are_those_of_their_values(fill, kind, a_transposed, b_transposed):
    if kind == "nvfp4 turned" and (a_transposed or not b_transposed):
        pytest.skip("only where both factors are turned do the turns cancel")
    a, b = (
        drawn(*((160, 128) if a_transposed else (128, 160))),
        drawn(*((128, 96) if b_transposed else (96, 128)), seed=1),
    )
    first, second = (in_blocks(x.shape, kind) for x in (a, b))
    fill("quantize", first, gpu(a), None)
    fill("quantize", second, gpu(b), None)
    bias, before = drawn(160, seed=2), drawn(96, 160, seed=3)
    out, grouped = gpu(before), gpu(before)
    operands = (first, a_transposed, second, b_transposed)
    fill(
        "generic_gemm",
        [out, None, None],
        *operands,
        out,
        None,
        None,
        gpu(bias),
        None,
        False,
        None,
        False,
        None,
        0,
        True,
        False,
    )
    rest = (None, [96], [gpu(bias)], None, True, [], False, [], 0, True, True, 0)
    fill("te_general_grouped_gemm", None, [first], a_transposed, [second], b_transposed, [grouped], *rest)
    y = (b.t() if b_transposed else b) @ (a.t() if a_transposed else a) + bias + before
    for result in (out, grouped):
        assert (result.cpu() - y).norm() < (0.2 if kind.startswith("nvfp4") else 0.05) * y.norm()


@pytest.mark.parametrize("kind", ["mxfp8", "squares"])
def test_fragments_of_a_weight_are_cast_as_the_whole_weight_is(fill, kind):
    x = drawn(160, 192) * torch.logspace(-3, 3, 192)
    whole, ours = in_blocks(x.shape, kind), in_blocks(x.shape, kind)
    fill("quantize", whole, gpu(x), None)
    pieces = [(start, gpu(x.flatten()[start : start + 10240])) for start in (0, 10240, 20480)]
    codes = [ours._rowwise_data.view(-1), ours._columnwise_data.view(-1)]
    inverses = [ours._rowwise_scale_inv, ours._columnwise_scale_inv]
    largest = [torch.zeros(inverse.shape, device="cuda") for inverse in inverses]
    parts = [[each.clone() for each in largest] for _ in pieces]
    for (start, piece), own in zip(pieces, parts, strict=True):
        if kind == "mxfp8":
            fill("mxfp8_scaling_compute_partial_amax", None, piece, *own, 160, 192, start)
        else:
            fill("fp8_block_scaling_compute_partial_amax", None, piece, own[0], 160, 192, start, 128)
    largest = [torch.stack(each).amax(0) for each in zip(*parts, strict=True)]  # what the ranks reduce
    scale = torch.empty_like(largest[0])
    if kind == "mxfp8":
        fill("multi_tensor_compute_scale_inv_e8m0", None, 65536, None, [largest, inverses])
    else:
        tensors = [[largest[0]], [scale], [inverses[0]]]
        fill("multi_tensor_compute_scale_and_scale_inv", None, 65536, None, tensors, 448.0, True, 0.0)
    for start, piece in pieces:
        own = [each[start : start + 10240] for each in codes]
        if kind == "mxfp8":
            fill("mxfp8_scaling_partial_cast", None, piece, *own, *inverses, 160, 192, start)
        else:
            fill("fp8_block_scaling_partial_cast", None, piece, own[0], scale, 160, 192, start, 128, 4)
    for name in ("rowwise", "columnwise") if kind == "mxfp8" else ("rowwise",):
        assert torch.equal(getattr(ours, f"_{name}_data"), getattr(whole, f"_{name}_data"))


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_go_to_their_experts_and_back_with_gradients(fill: Callable[..., None], padded: bool) -> None:
    tokens, experts, hidden = 6, 4, 3
    routing = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1]])
    x, probs = drawn(tokens, hidden).requires_grad_(), (drawn(tokens, experts, seed=1) * routing).requires_grad_()
    by_expert, of_tokens = routing.t().nonzero(as_tuple=True)
    offsets = torch.arange(experts) * padded
    places = torch.arange(len(of_tokens)) + offsets[by_expert]
    row_ids = torch.empty(tokens, 2 * experts + 1, dtype=torch.int32, device="cuda")
    fill("make_row_id_map", row_ids, gpu(routing.int()), tokens, experts)

    total = int(places[-1]) + 1
    out, moved_probs = (torch.zeros(*shape, device="cuda") for shape in ((total, hidden), (total,)))
    sizes, pad = (tokens, experts, total, hidden), gpu(offsets.int()) if padded else None
    fill("permute_with_mask_map", [out, None, moved_probs], gpu(x), row_ids, gpu(probs), None, pad, *sizes, 0)
    same([out[places.cuda()], moved_probs[places.cuda()]], [x[of_tokens], probs[of_tokens, by_expert]])

    merged = torch.zeros_like(x).index_add(0, of_tokens, x[of_tokens] * probs[of_tokens, by_expert, None])
    back, back_probs = empty(x, probs)
    known = (gpu(out), row_ids)
    fill("unpermute_with_mask_map", [back, None], *known, gpu(probs), None, pad, tokens, experts, hidden)
    same([back], [merged])
    fill("unpermute_with_mask_map", [back, back_probs], *known, None, moved_probs, pad, tokens, experts, hidden)
    same([back, back_probs], [x * routing.sum(1, keepdim=True), probs])

    gradient = drawn(tokens, hidden, seed=2)
    dprobs, dout = empty(probs)[0], torch.zeros_like(out)
    known = (gpu(gradient), row_ids, out, gpu(probs), pad)
    fill("unpermute_with_mask_map_bwd_with_merging_probs", [dout, dprobs], *known, *sizes)
    [expected] = torch.autograd.grad(merged, probs, gradient)
    same([dprobs, dout[places.cuda()]], [expected, gradient[of_tokens] * probs[of_tokens, by_expert, None]])


def test_chunks_are_sorted_and_sorted_back(fill: Callable[..., None]) -> None:
    x, probs = drawn(8, 3), drawn(8, seed=1)
    parts = list(range(8)[:2]), list(range(8)[2:5]), list(range(8)[5:7])  # and a row behind all chunks
    sizes, order = torch.tensor([2, 3, 2], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    expected = torch.tensor([*parts[2], *parts[0], *parts[1], 7])
    row_ids = torch.empty(8, dtype=torch.int32, device="cuda")
    fill("make_chunk_sort_map", row_ids, gpu(sizes), gpu(order), 8, 3)
    result, again = empty(x, probs), empty(x, probs)
    fill("sort_chunks_by_map", result, gpu(x), row_ids, gpu(probs), 8, 3, True)
    same(result, [x[expected], probs[expected]])
    fill("sort_chunks_by_map", again, result[0], row_ids, result[1], 8, 3, False)
    same(again, [x, probs])
