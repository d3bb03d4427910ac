# SPDX-License-Identifier: Apache-2.0
"""Grouped experts against experts one after the other, in the cases that a whole model seldom meets."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from support import small_runs
from support.ranks import each
from support.small_runs import device

CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "some without tokens": ([0, 5, 0, 2], {}),
    "none with tokens": ([0, 0, 0, 0], {}),
    "biases": ([1, 2, 3, 1], {"add_bias_linear": True}),
    "rows that aren't of 16 bytes": ([1, 2, 3, 1], {"moe_ffn_hidden_size": 6}),
    "not gated": ([2, 2, 2, 1], {"gated_linear_unit": False}),
    "weighted before": (
        [3, 1, 2, 1],
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
}


def run(case: str, *, grouped: bool, adapter: bool = False) -> list[torch.Tensor]:
    """The output, the gradients of tokens and probabilities, and those of all parameters."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo2.models.layers.experts import LocalExperts, TorchGroupedMLP

    if not parallel_state.model_parallel_is_initialized():
        small_runs.start_megatron()
    counts, fields = CASES[case]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        **{
            "moe_ffn_hidden_size": 24,
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": False,
        }
        | fields,
    )
    kind = TorchGroupedMLP if grouped else LocalExperts
    layers: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = kind(4, config, layers, pg_collection=ProcessGroupCollection.use_mpu_process_groups()).to(device())
    generator = torch.Generator().manual_seed(2)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    if adapter:
        layer: Any = experts.local_experts[1].linear_fc1
        experts.local_experts[1].linear_fc1 = Doubled(layer)
    x = torch.randn(sum(counts), 16, generator=generator).to(device()).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).to(device()).requires_grad_()
    out, bias = experts(x, torch.tensor(counts), probs)
    assert bias is None
    parameters = list(experts.parameters())
    gradients = torch.autograd.grad(out.square().sum(), [x, probs, *parameters], allow_unused=True)
    unused = [p.shape for p, gradient in zip(parameters, gradients[2:], strict=True) if gradient is None]
    assert not unused, "the reduction of gradients waits for every parameter"
    return [out.detach(), *[x if x is not None else torch.zeros(1) for x in gradients]]


class Doubled(torch.nn.Module):
    """An adapter, as the layer that it wraps sees it."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out, bias = self.layer(x)
        return 2 * out, bias


def both() -> dict[str, list[float]]:
    """Distances of grouped from single, relative to the largest number in each tensor."""
    answers = {}
    for case in CASES:
        pairs = zip(run(case, grouped=True), run(case, grouped=False), strict=True)
        answers[case] = [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs if b.numel()]
    plain, doubled, single = (
        run("biases", grouped=g, adapter=a) for g, a in ((True, False), (True, True), (False, True))
    )
    answers["adapter"] = [float((a - b).norm()) for a, b in zip(doubled, single, strict=True)]
    answers["adapter works"] = [float((plain[0] - doubled[0]).norm())]
    return answers


@pytest.fixture(scope="module")
def distances(run_on_ranks) -> dict[str, list[float]]:
    return run_on_ranks(both, 1)[0]


@pytest.mark.parametrize("case", CASES)
def test_grouped_products_are_those_of_single_experts(distances, case):
    assert max(distances[case]) < 1e-5


def test_an_experts_layer_that_was_wrapped_is_still_called(distances):
    assert distances["adapter works"][0] > 1e-2
    assert max(distances["adapter"]) == 0.0


def exchange(sizes: list[int]) -> list[list[float]]:
    """This rank's view of everybody's rows, and the gradient that comes back to its own."""
    small_runs.start_megatron(tensor_model_parallel_size=2)
    rank, group = torch.distributed.get_rank(), parallel_state.get_tensor_model_parallel_group()
    own = torch.full((sizes[rank], 2), 1.0 + rank, requires_grad=True, device=device())
    whole = tensor_parallel.gather_from_sequence_parallel_region(own, group=group, output_split_sizes=sizes)
    (gradient,) = torch.autograd.grad((whole * torch.arange(1.0, 1 + len(whole), device=device())[:, None]).sum(), own)
    return [whole[:, 0].tolist(), gradient[:, 0].tolist()]


def test_ranks_with_different_numbers_of_tokens_exchange_them(run_on_ranks):
    cases = [[3, 1], [0, 2], [2, 2], [0, 0]]
    ranks = run_on_ranks(each, 2, exchange, [(sizes,) for sizes in cases])
    for sizes, *answers in zip(cases, *ranks, strict=True):
        rows = [1.0] * sizes[0] + [2.0] * sizes[1]
        places = [2.0 * place for place in range(1, 1 + len(rows))]  # from both ranks
        assert answers == [[rows, places[: sizes[0]]], [rows, places[sizes[0] :]]]


OVERLAPPED = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": True,
}


def losses(*, expert_parallel: int, overlapped: bool, bucket_size: int) -> list[float]:
    from megatron.core.distributed import DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=overlapped,
        bucket_size=bucket_size,
    )
    model = small_runs.build_llama(distributed=True, **OVERLAPPED)
    run = small_runs.fit(model, max_steps=4, expert_model_parallel_size=expert_parallel, ddp=ddp)
    small_runs.release()
    return run["losses"]


def overlapped_and_not() -> dict[str, list[list[float]]]:
    """Buckets of everything, and of so few parameters that a bucket holds experts only."""
    return {
        f"EP {ep}, {bucket}": [
            losses(expert_parallel=ep, overlapped=value, bucket_size=bucket) for value in (True, False)
        ]
        for ep, bucket in ((2, 40_000_000), (1, 2_000))
    }


def test_grouped_experts_wait_for_the_gather_of_their_parameters(run_on_ranks):
    for layout, (overlapped, plain) in run_on_ranks(overlapped_and_not, 2)[0].items():
        assert len(plain) == 4
        assert overlapped == plain, layout
