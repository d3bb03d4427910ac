# SPDX-License-Identifier: Apache-2.0
"""FusedAdam against torch's own optimizers, and the state layout that Megatron-Core relies on."""

import copy

import pytest
import torch

from nemo2.base.backend.fused_adam import FusedAdam

HYPER = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), ())]


def step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize(("adam_w_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_it_moves_parameters_as_torch_does(adam_w_mode, reference):
    ours, theirs = parameters(), parameters()
    fused = FusedAdam(ours, adam_w_mode=adam_w_mode, **HYPER)
    expected = reference(theirs, **HYPER)
    for number in range(20):
        fused.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = 0.02 / (number + 1)
        step(fused, ours, number)
        step(expected, theirs, number)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_step_is_an_integer_of_the_group_and_absent_from_an_empty_one():
    params = parameters()
    optimizer = FusedAdam([{"params": params}, {"params": []}], **HYPER)
    step(optimizer, params, 0)
    step(optimizer, params, 1)
    assert optimizer.param_groups[0]["step"] == 2
    assert "step" not in optimizer.param_groups[1]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state_dict()["state"].values())


def test_a_restored_optimizer_continues_exactly():
    params = parameters()
    optimizer = FusedAdam(params, **HYPER)
    step(optimizer, params, 0)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = FusedAdam(twins, **HYPER)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer, params, 1)
    step(restored, twins, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_parameters_without_a_gradient_stay():
    params = parameters()
    before = params[1].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    FusedAdam(params, **HYPER).step()
    assert torch.equal(params[1], before)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"capturable": True}, "CUDA graphs"),
        ({"bias_correction": False}, "bias_correction"),
        ({"betas": (0.9, 1.0)}, "at least 0 and less than 1"),
        ({"eps": 0.0}, "must be above 0"),
    ],
)
def test_what_it_cannot_do_is_refused(argument, words):
    with pytest.raises(ValueError, match=words):
        FusedAdam(parameters(), **argument)
