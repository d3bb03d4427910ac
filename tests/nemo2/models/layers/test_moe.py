# SPDX-License-Identifier: Apache-2.0
"""A router's padding. The weights of its losses are measured in tests/nemo2/mcore/parallel/test_extra_losses.py."""

from typing import Any

import pytest
import torch

from support import small_runs
from support.ranks import each

LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1, 0.1],
    "moe_z_loss_coeff": 0.1,
}


def routed(padding: list[list[bool]] | None, per_token: bool = True, ranks: int = 1) -> dict[str, Any]:
    """What a router of 4 experts counts of 2 sequences of 6 tokens, and the gradient of its losses by token.

    Args:
        padding: By sequence, True for padding. None: the router is given no mask.
        ranks: Tensor-parallel ranks, of which each has a part of the sequences and all of the mask.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo2.models.layers.moe import WeightedRouter

    small_runs.start_megatron(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=8,
        add_bias_linear=False,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        calculate_per_token_loss=per_token,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        **LOSSES,
    )
    router: Any = WeightedRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    device = small_runs.device()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
    tokens = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(3)).to(device)
    x = tokens.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()].requires_grad_()
    mask = None if padding is None else torch.tensor(padding, device=device).transpose(0, 1)
    probs, _ = router(x, mask)
    (gradient,) = torch.autograd.grad(0.0 * probs.sum(), x)
    return {
        "counted": float(router.local_tokens_per_expert.sum()),
        "by_token": gradient.norm(dim=-1).T.tolist(),
        "gradient": gradient.tolist(),
    }


PADDING = [[False] * 6, [False] * 2 + [True] * 4]
ALONE: list[tuple[Any, bool]] = [(PADDING, True), (PADDING, False), ([[True] * 6] * 2, True), (None, True)]


@pytest.fixture(scope="module")
def alone(run_on_ranks: Any) -> list[dict[str, Any]]:
    """In one process, by `ALONE`."""
    return run_on_ranks(each, 1, routed, ALONE)[0]


def test_padding_has_no_gradient_and_is_not_counted_for_the_bias(alone: Any) -> None:
    for found in alone[:2]:
        assert found["counted"] == 2 * 8
        for flags, norms in zip(PADDING, found["by_token"], strict=True):
            assert all((norm == 0) is flag for flag, norm in zip(flags, norms, strict=True))


def test_a_micro_batch_of_padding_has_gradients_of_zero(alone: Any) -> None:
    assert (alone[2]["counted"], alone[2]["by_token"]) == (0.0, [[0.0] * 6] * 2)


def test_ranks_that_share_a_sequence_have_the_gradient_of_the_whole(run_on_ranks: Any, alone: Any) -> None:
    """Behind the first pipeline stage a rank is given the mask of all of the sequence."""
    ranks = run_on_ranks(each, 2, routed, [(None, True, 2), (PADDING, True, 2)])
    for whole, parts in zip((alone[3], alone[0]), zip(*ranks, strict=True), strict=True):
        torch.testing.assert_close(
            torch.tensor([token for part in parts for token in part["gradient"]]), torch.tensor(whole["gradient"])
        )
