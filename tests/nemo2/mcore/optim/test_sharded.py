# SPDX-License-Identifier: Apache-2.0
"""The optimizer of sharded parameters in one process, against plain PyTorch."""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from nemo2.base.backend import get_backend
from nemo2.mcore.optim.sharded import ShardedOptimizer

CLIPPED = [0.0, 0.5, 100.0]
SCALER = {"initial_loss_scale": 64.0, "min_loss_scale": 2.0, "loss_scale_window": 7.0, "hysteresis": 3}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (3, 5)]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def stepped(clip_grad: float, **fp16: Any) -> tuple[float | None, list[list[float]]]:
    """The gradient norm and the parameters after a step on gradients of a scaled loss."""
    held = parameters()
    config = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=clip_grad, **fp16)
    optimizer = ShardedOptimizer(torch.optim.SGD(held, lr=0.1), config)
    for parameter in held:
        assert parameter.grad is not None
        parameter.grad = optimizer.scale_loss(parameter.grad)
    optimizer.step()
    return optimizer.grad_norm, [parameter.tolist() for parameter in held]


def with_a_scaler() -> tuple[list[Any], tuple[float, ...]]:
    get_backend().install()  # Megatron-Core makes scales on a GPU
    scaler = ShardedOptimizer(torch.optim.SGD(parameters()), OptimizerConfig(fp16=True, **SCALER)).scaler
    assert scaler is not None
    settings = float(scaler.scale), float(scaler.min_scale), scaler.growth_interval, scaler.hysteresis
    return [stepped(clip_grad, fp16=True, loss_scale=8.0) for clip_grad in CLIPPED], settings


def test_a_step_is_torchs_on_clipped_gradients_whatever_the_scale_of_the_loss(run_on_ranks: Any) -> None:
    [(scaled, settings)] = run_on_ranks(with_a_scaler, 1, init_process_group=False)
    assert settings == tuple(SCALER.values())
    for clip_grad, of_scaled in zip(CLIPPED, scaled, strict=True):
        theirs = parameters()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs, clip_grad or float("inf")))
        torch.optim.SGD(theirs, lr=0.1).step()
        for found, values in (stepped(clip_grad), of_scaled):
            assert found == pytest.approx(norm, rel=1e-6)
            for mine, parameter in zip(values, theirs, strict=True):
                torch.testing.assert_close(torch.tensor(mine), parameter.detach())


@pytest.mark.skipif(
    not hasattr(OptimizerConfig, "grad_norm_skip_threshold"), reason="Megatron-Core has no such threshold"
)
def test_a_step_whose_norm_exceeds_the_threshold_changes_nothing() -> None:
    before = [parameter.tolist() for parameter in parameters()]
    norm, _ = stepped(0.0)
    assert norm is not None
    assert stepped(0.0, grad_norm_skip_threshold=norm * 0.99) == (norm, before)
    assert stepped(0.0, grad_norm_skip_threshold=norm * 1.01)[1] != before


def test_states_of_parameters_never_updated_are_zeros_and_nothing_else_changes() -> None:
    """Adam's weight decay would be in its moments."""
    held, before = parameters(), parameters()
    inner = torch.optim.Adam([{"params": held[:1]}, {"params": held[1:], "lr": 0.2}], lr=0.1, weight_decay=0.5)
    ShardedOptimizer(inner).make_state()
    assert len(inner.state) == 2
    assert all(not value.any() for state in inner.state.values() for value in state.values())
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.2]
    for parameter, other in zip(held, before, strict=True):
        torch.testing.assert_close((parameter, parameter.grad), (other, other.grad), rtol=0, atol=0)
