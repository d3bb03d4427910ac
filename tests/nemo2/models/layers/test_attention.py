# SPDX-License-Identifier: Apache-2.0
"""SDPAttention against attention written out, alone and over context-parallel ranks, gradients included."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.backend import get_backend
from nemo2.base.errors import ConfigError
from nemo2.models.layers.attention import SDPAttention
from nemo2.models.layers.notices import say_once

S, B, N, D = 16, 2, 4, 8


def attention(
    mask_type: AttnMaskType = AttnMaskType.causal,
    *,
    groups: int = 2,
    scale: float | None = None,
    way: str | None = None,
    **fields,
):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=N * D,
        num_attention_heads=N,
        num_query_groups=groups,
        **{"attention_dropout": 0.0, **fields},
    )
    return SDPAttention(config, 1, mask_type, "self", softmax_scale=scale, cp_comm_type=way)


def inputs(groups: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(S, B, heads, D, generator=generator).requires_grad_() for heads in (N, groups, groups)]


def padding_mask() -> torch.Tensor:
    """`[B, 1, 1, S]`, True for the last tokens of the second sample."""
    mask = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    mask[1, ..., -5:] = True
    return mask


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    forbidden: torch.Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """`forbidden` is broadcastable to `[B, N, S, S]`, `sink` has a score of each head. In double precision."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(N // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or D**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp().masked_fill(forbidden, 0.0)
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else sink.double().exp().view(-1, 1, 1))
    return (weights @ v / total).permute(2, 0, 1, 3).flatten(2)


CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)
NOTHING = torch.zeros(S, S, dtype=torch.bool)


def distances() -> torch.Tensor:
    """How far each key (column) stands behind each query (row)."""
    place = torch.arange(S)
    return place[:, None] - place


CASES: dict[str, tuple[AttnMaskType, torch.Tensor | None, torch.Tensor]] = {
    "causal": (AttnMaskType.causal, None, CAUSAL),
    "causal and padding": (AttnMaskType.padding_causal, padding_mask(), CAUSAL | padding_mask()),
    "padding": (AttnMaskType.padding, padding_mask(), padding_mask()),
    "arbitrary": (AttnMaskType.arbitrary, CAUSAL.flip(0, 1)[None, None], CAUSAL.flip(0, 1)),
    "none": (AttnMaskType.no_mask, padding_mask(), NOTHING),
}


def assert_same_with_gradients(actual: torch.Tensor, wanted: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, wanted.float(), rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(out.square().sum(), leaves) for out in (actual, wanted)]
    for a, b in zip(*gradients, strict=True):
        # By norm: where a query sees one key its gradient is zero, and rounding is all there is to compare.
        assert (a - b).norm() < 1e-6 * b.norm()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("mask_type", "mask", "forbidden"), CASES.values(), ids=CASES.keys())
def test_values_and_gradients(mask_type, mask, forbidden, groups):
    leaves = inputs(groups)
    actual = attention(mask_type, groups=groups)(*leaves, mask)
    assert_same_with_gradients(actual, by_hand(*leaves, forbidden=forbidden), leaves)


def test_the_call_may_name_another_mask_and_the_constructor_another_scale():
    leaves = inputs()
    actual = attention(AttnMaskType.causal, scale=0.3)(*leaves, None, attn_mask_type=AttnMaskType.no_mask)
    assert_same_with_gradients(actual, by_hand(*leaves, forbidden=NOTHING, scale=0.3), leaves)


def test_layer_scaling_cancels_out():
    leaves = inputs()
    scaled = attention(apply_query_key_layer_scaling=True)(*leaves, None)
    assert torch.equal(scaled, attention()(*leaves, None))


def test_the_last_queries_see_all_keys():
    q, k, v = inputs()
    whole = attention()(q, k, v, None)
    torch.testing.assert_close(attention()(q[-3:], k, v, None), whole[-3:], rtol=1e-6, atol=1e-6)


def test_a_query_that_sees_nothing_gives_zeros_and_no_nan():
    q, k, v = inputs()
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    mask[0, 0, 3] = True
    out = attention(AttnMaskType.arbitrary)(q, k, v, mask)
    assert torch.all(out[3, 0] == 0) and torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


def test_values_may_be_narrower_than_keys():
    q, k, v = inputs()
    assert attention()(q, k, v[..., :3], None).shape == (S, B, N * 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attention(qk_clip=True), "qk_clip=True"),
        (lambda: attention()(*inputs(), None, attention_bias=torch.zeros(1)), "attention_bias"),
        (
            lambda: attention()(*packed_inputs(), padding_mask(), packed_seq_params=packed(S)),
            "mask was passed with packed",
        ),
        (
            lambda: attention()(*packed_inputs(), None, packed_seq_params=PackedSeqParams(qkv_format="bshd")),
            "qkv_format='bshd'",
        ),
        (
            lambda: attention(AttnMaskType.no_mask)(
                *packed_inputs(), None, packed_seq_params=packed(3, 9, padded=(8, S))
            ),
            "need causal attention",
        ),
        (
            lambda: attention(way="a2a", context_parallel_size=4),
            "is not a multiple of .* 1 \\* 4 = 4. Set cp_comm_type to 'p2p'",
        ),
        (lambda: attention(way="a2a+p2p", context_parallel_size=2), "one of 'all_gather', 'p2p', 'a2a'"),
    ],
)
def test_what_it_would_ignore_or_cannot_do_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


# ------------------------------------------------------------------------ windows, soft caps, sinks, packed sequences


@pytest.mark.parametrize(
    ("mask_type", "fields", "forbidden"),
    [
        (AttnMaskType.causal, {"window_size": (3, 0)}, CAUSAL | (distances() > 3)),
        (AttnMaskType.no_mask, {"window_size": (2, 4)}, (distances() < -4) | (distances() > 2)),
        (AttnMaskType.causal, {"window_size": (-1, 0)}, CAUSAL),
        (AttnMaskType.causal, {"window_size": (3, 0), "window_attn_skip_freq": 1}, CAUSAL),
        (AttnMaskType.causal, {"window_size": (3, 0), "window_attn_skip_freq": [0]}, CAUSAL),
    ],
)
def test_windows(mask_type, fields, forbidden):
    leaves = inputs()
    assert_same_with_gradients(
        attention(mask_type, **fields)(*leaves, None), by_hand(*leaves, forbidden=forbidden), leaves
    )


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_soft_caps_and_sinks(window):
    leaves = inputs()
    module = attention(softmax_type="learnable", window_size=window, use_cpu_initialization=True)
    module.softcap = 0.7
    with torch.no_grad():
        module.softmax_offset.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    forbidden = CAUSAL | (distances() > (S if window is None else 3))
    reference = by_hand(*leaves, forbidden=forbidden, softcap=0.7, sink=module.softmax_offset)
    assert_same_with_gradients(module(*leaves, None), reference, [*leaves, module.softmax_offset])


def test_an_off_by_one_softmax_has_a_score_of_zero_more():
    leaves = inputs()
    reference = by_hand(*leaves, forbidden=CAUSAL, sink=torch.zeros(N))
    assert_same_with_gradients(attention(softmax_type="off-by-one")(*leaves, None), reference, leaves)


def test_a_soft_cap_with_a_mask_of_its_own():
    leaves = inputs()
    module = attention(AttnMaskType.padding_causal)
    module.softcap = 0.7
    reference = by_hand(*leaves, forbidden=CAUSAL | padding_mask(), softcap=0.7)
    assert_same_with_gradients(module(*leaves, padding_mask()), reference, leaves)


def packed(*ends: int, padded: tuple[int, ...] | None = None) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
    spaced = None if padded is None else torch.tensor([0, *padded], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=spaced,
        cu_seqlens_kv_padded=spaced,
    )


def packed_inputs() -> list[torch.Tensor]:
    return [x.detach()[:, 0].requires_grad_() for x in inputs()]


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_packed_sequences_do_not_see_each_other(window):
    leaves = packed_inputs()
    sequence = torch.tensor([0] * 5 + [1] * 1 + [2] * 8 + [3] * 2)  # the last two follow the last sequence
    forbidden = (sequence[:, None] != sequence) | CAUSAL | (distances() > (S if window is None else 2))
    reference = by_hand(*(x[:, None] for x in leaves), forbidden=forbidden)[:, 0]
    actual = attention(window_size=window)(*leaves, None, packed_seq_params=packed(5, 6, 14))
    assert_same_with_gradients(actual, reference, leaves)


def test_padding_behind_a_packed_sequence_changes_nothing_in_front_of_it():
    q, k, v = packed_inputs()
    padded = attention()(q, k, v, None, packed_seq_params=packed(3, 9, padded=(8, 16)))
    alone = attention()(q[8:14], k[8:14], v[8:14], None, packed_seq_params=packed(6))
    torch.testing.assert_close(padded[8:14], alone, rtol=1e-6, atol=1e-6)


def dropout(sequence_parallel: bool) -> dict[str, Any]:
    get_backend().install()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    module = attention(attention_dropout=0.4, sequence_parallel=sequence_parallel, tensor_model_parallel_size=2)
    leaves = inputs()

    def draw(model_parallel: torch.Tensor, default: int) -> tuple[torch.Tensor, bool]:
        tracker.set_states({"model-parallel-rng": model_parallel})
        torch.manual_seed(default)
        before = torch.get_rng_state()
        return module(*leaves, None), torch.equal(before, torch.get_rng_state())

    state = tracker.get_states()["model-parallel-rng"]
    other = torch.Generator().manual_seed(12).get_state()
    first, untouched = draw(state, 0)
    return {
        "repeats": torch.equal(first, draw(state, 0)[0]),
        "follows the tracker": not torch.equal(first, draw(other, 0)[0]),
        "follows the default generator": not torch.equal(first, draw(state, 1)[0]),
        "leaves the default generator alone": untouched,
        "is off in evaluation": torch.equal(module.eval()(*leaves, None), attention()(*leaves, None)),
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_megatrons_generator_unless_the_sequence_is_split(run_on_ranks, sequence_parallel):
    assert run_on_ranks(dropout, 1, sequence_parallel, init_process_group=False)[0] == {
        "repeats": True,
        "follows the tracker": not sequence_parallel,
        "follows the default generator": sequence_parallel,
        "leaves the default generator alone": not sequence_parallel,
        "is off in evaluation": True,
    }


Case = tuple[AttnMaskType, torch.Tensor | None, dict[str, Any], tuple[int, ...]]
# Mask type, mask, fields of the module and, where packed, the ends of the sequences. For two ranks, four and a ring.
OVER_RANKS: dict[str, Case] = {name: (kind, mask, {}, ()) for name, (kind, mask, _) in CASES.items()} | {
    "window": (AttnMaskType.causal, None, {"window_size": (3, 0)}, ()),
    "soft cap": (AttnMaskType.causal, None, {"softcap": 0.7}, ()),
    "sinks": (AttnMaskType.causal, None, {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])}, ()),
    "all of them": (AttnMaskType.no_mask, None, {"window_size": (5, 2), "softcap": 0.7, "sink": torch.ones(N)}, ()),
    "packed": (AttnMaskType.causal, None, {}, (8,)),
    "packed, with a window and sinks": (
        AttnMaskType.causal,
        None,
        {"window_size": (3, 0), "sink": torch.ones(N)},
        (8,),
    ),
}
WAYS = ("all_gather", "p2p", "a2a")


def attend_case(case: str, places: torch.Tensor, *, groups: int, cp: int = 1, way: str | None = None) -> list[Any]:
    """The output at `places` of the sequence and the gradients there; the sinks' gradient last, where there are any."""
    mask_type, mask, fields, ends = OVER_RANKS[case]
    fields = dict(fields)
    softcap, sink = fields.pop("softcap", None), fields.pop("sink", None)
    softmax_type = "vanilla" if sink is None else "learnable"
    fields |= {"context_parallel_size": cp, "softmax_type": softmax_type, "use_cpu_initialization": True}
    module = attention(mask_type, groups=groups, way=way, **fields)
    module.softcap = softcap
    if sink is not None:
        with torch.no_grad():
            module.softmax_offset.copy_(sink)
    leaves = [x.detach()[places].requires_grad_() for x in inputs(groups)]
    if mask is not None and mask.size(2) == S:
        mask = mask[:, :, places]
    tensors = [x[:, 0] for x in leaves] if ends else leaves
    out = module(*tensors, mask, packed_seq_params=packed(*ends) if ends else None)
    wanted = [*leaves, *([] if sink is None else [module.softmax_offset])]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]


def over_ranks(groups: int) -> dict[tuple[str, str], list[Any]]:
    """This rank's share of the output and of the gradients, for each case and way."""
    get_backend().install()
    cp, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    return {
        (case, way): attend_case(case, own_places(case, cp, rank), groups=groups, cp=cp, way=way)
        for case in OVER_RANKS
        for way in WAYS
    }


def own_places(case: str, cp: int, rank: int) -> torch.Tensor:
    """Chunks `rank` and `2 * cp - 1 - rank` of each sequence."""
    bounds = [0, *OVER_RANKS[case][3], S]
    chunks = [torch.arange(start, end).chunk(2 * cp) for start, end in itertools.pairwise(bounds)]
    return torch.cat([part for of_one in chunks for part in (of_one[rank], of_one[2 * cp - 1 - rank])])


@pytest.mark.parametrize(("cp", "groups"), [(2, 2), (4, 4)])
def test_context_parallel_ranks_give_their_share_of_the_whole(run_on_ranks, cp, groups):
    answers = run_on_ranks(over_ranks, cp, groups)
    for case, way in itertools.product(OVER_RANKS, WAYS):
        whole = attend_case(case, torch.arange(S), groups=groups)
        for rank, answer in enumerate(answers):
            places = own_places(case, cp, rank)
            for share, full in zip(answer[case, way][:4], whole[:4], strict=True):
                assert (share - full[places]).norm() < 2e-6 * full.norm(), (case, way, rank)
        if len(whole) == 5:  # the sinks' gradient, of which every rank has its queries' or its heads' part
            total = sum(answer[case, way][4] for answer in answers)
            assert (total - whole[4]).norm() < 2e-6 * whole[4].norm(), (case, way)


def uncuttable() -> str:
    from nemo2.base.errors import DataError

    get_backend().install()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tensors = [x.detach()[:8, 0] for x in inputs()]
    with pytest.raises(DataError) as caught:
        attention(context_parallel_size=2)(*tensors, None, packed_seq_params=packed(6, 16))
    return str(caught.value)


def test_a_pack_that_cannot_be_cut_is_refused(run_on_ranks):
    for message in run_on_ranks(uncuttable, 2):
        assert "2 of 2 sequences cannot be split for context_parallel_size=2" in message
        assert "The first is at tokens 0 to 6 and has 6 tokens" in message and "a multiple of 4 tokens" in message


@pytest.mark.parametrize(("way", "told"), [(None, 1), ("all_gather", 0), ("p2p", 0)])
def test_that_nothing_overlaps_is_said_once_where_no_way_is_asked_for(
    caplog: pytest.LogCaptureFixture, way: str | None, told: int
) -> None:
    say_once.cache_clear()
    config = TransformerConfig(
        num_layers=1, hidden_size=N * D, num_attention_heads=N, context_parallel_size=2, attention_dropout=0.0
    )
    with caplog.at_level("WARNING"):
        for layer in (1, 2):
            groups: Any = SimpleNamespace(cp=None)
            SDPAttention(config, layer, AttnMaskType.causal, "self", cp_comm_type=way, pg_collection=groups)
    say_once.cache_clear()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("overlaps with nothing" in line and "model.config.cp_comm_type" in line for line in lines) == told
