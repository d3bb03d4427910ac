# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel's masks and caps, uncompiled on a CPU, against the same attention step by step; and who gets it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from nemo2.models.layers import flex
from nemo2.models.layers.attend import attend
from nemo2.models.layers.attention_rule import AttentionRule
from nemo2.models.layers.notices import say_once

RULES = {
    "capped": AttentionRule(causal=True, scale=0.3, softcap=2.0),
    "capped, uncausal": AttentionRule(causal=False, scale=0.3, softcap=2.0),
    "capped window": AttentionRule(causal=True, scale=0.3, softcap=2.0, window=(5, 0)),
    "window": AttentionRule(causal=True, scale=0.3, window=(5, 0)),
    "window both ways": AttentionRule(causal=False, scale=0.3, window=(5, 3)),
    "window to one side": AttentionRule(causal=False, scale=0.3, window=(-1, 3)),
    "window to the other": AttentionRule(causal=False, scale=0.3, window=(5, -1)),
}


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    def forget() -> None:
        flex._shapes.clear()
        for cached in (flex._kernels, flex._capped, flex._block_mask, flex._works, say_once):
            cached.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("queries", "keys", "first_query"), [(24, 24, 0), (8, 24, 16), (8, 24, 8)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, rule: AttentionRule, queries: int, keys: int, first_query: int
) -> None:
    # torch refuses a backward on CPUs for what it compiles; uncompiled it has one.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    wanted = attend(*leaves, rule, first_query=first_query)
    monkeypatch.setattr(flex, "takes", lambda *tensors, others: not others)
    found = attend(*leaves, rule, first_query=first_query)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def on_gpu(tokens: int = 8, *, width: int = 16, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tensor, as far as `takes` reads it."""
    shape = (1, 2, tokens, width)
    return SimpleNamespace(
        is_cuda=True, shape=shape, size=lambda at: shape[at], dtype=dtype, device=torch.device("cuda")
    )


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_works", lambda *question: True)
    capped, plain = RULES["capped"], AttentionRule(causal=True, scale=1.0)

    def taken(rule: AttentionRule, q: Any, v: Any, *, others: bool = False) -> bool:
        return flex.takes(q, q, v, rule, 0, others=others)

    assert taken(capped, on_gpu(), on_gpu())
    assert taken(RULES["window"], on_gpu(), on_gpu())
    assert not taken(plain, on_gpu(), on_gpu())  # scaled_dot_product_attention has it
    assert not taken(capped, on_gpu(), on_gpu(), others=True)
    assert not taken(capped, on_gpu(), on_gpu(width=8))
    assert not taken(capped, on_gpu(dtype=torch.float64), on_gpu())
    on_cpu = torch.zeros(1, 2, 8, 16)
    assert not taken(capped, on_cpu, on_cpu)


def test_many_shapes_are_not_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(flex, "_works", lambda *question: True)
    with caplog.at_level(logging.WARNING):
        taken = [flex.takes(on_gpu(n), on_gpu(n), on_gpu(n), RULES["capped"], 0, others=False) for n in range(8, 18)]
        first = flex.takes(on_gpu(8), on_gpu(8), on_gpu(8), RULES["capped"], 0, others=False)
    assert taken == [True] * flex.MAX_SHAPES + [False] * (10 - flex.MAX_SHAPES)
    assert first  # what has been compiled stays in use
    assert len(caplog.records) == 1


def test_a_compiler_that_fails_is_said_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    # On a CPU torch refuses the backward, as a compiler would that lacks the memory for wide heads.
    with caplog.at_level(logging.WARNING):
        answers = [flex._works(torch.float32, 16, torch.device("cpu"), RULES["capped"]) for _ in range(2)]
    assert answers == [False, False]
    assert len(flex._shapes) == 1  # torch counts the trial among the shapes that it compiles
    (record,) = caplog.records
    assert "NotImplementedError" in record.getMessage() and "scores stay in memory" in record.getMessage()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_trial_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    before = torch.random.get_rng_state()
    with torch.no_grad():
        assert flex._works(torch.float32, 16, torch.device("cpu"), RULES["capped window"])
    assert torch.equal(torch.random.get_rng_state(), before)
