# SPDX-License-Identifier: Apache-2.0
"""Products in 16 bits on processors without instructions for them."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nemo2.base.backend import low_precision_matmul

OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 7), (7, 3)]),
    "bmm": (torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    "addmm": (functools.partial(torch.addmm, beta=0.5, alpha=2.0), [(3,), (5, 7), (7, 3)]),
    "baddbmm": (functools.partial(torch.baddbmm, beta=0.0, alpha=0.25), [(2, 5, 3), (2, 5, 7), (2, 7, 3)]),
}


@pytest.fixture
def in_float32() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replaced = low_precision_matmul.in_float32()
    yield
    replaced._destroy()


def with_gradients(product: Callable[..., torch.Tensor], operands: list[torch.Tensor]) -> list[Any]:
    leaves = [one.clone().requires_grad_() for one in operands]
    result = product(*leaves)
    result.backward(torch.ones_like(result))
    return [result.detach(), *(one.grad for one in leaves)]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_products_in_16_bits_are_those_in_float32_rounded_once(name: str, dtype: Any, in_float32: None) -> None:
    product, shapes = OPERATORS[name]
    operands = [torch.randn(shape).to(dtype) for shape in shapes]
    got = with_gradients(product, operands)
    expected = with_gradients(product, [one.float() for one in operands])
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-2)
    assert torch.equal(got[0], expected[0].to(dtype))


def test_products_in_float32_are_those_of_torch_and_all_are_restored() -> None:
    a, b = torch.randn(33, 65), torch.randn(65, 17)
    before = [torch.mm(a, b), torch.mm(a.bfloat16(), b.bfloat16())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replaced = low_precision_matmul.in_float32()
    inside = [torch.mm(a, b), torch.mm(a.bfloat16(), b.bfloat16())]
    replaced._destroy()
    after = [torch.mm(a, b), torch.mm(a.bfloat16(), b.bfloat16())]
    assert torch.equal(inside[0], before[0])
    assert all(map(torch.equal, before, after))


def test_the_backend_replaces_them_where_they_are_slow(run_on_ranks: Any) -> None:
    assert run_on_ranks(are_replaced, 1) == [low_precision_matmul.is_slow()]


def are_replaced() -> bool:
    from nemo2.base.backend.cpu import CpuBackend

    backend = CpuBackend()
    backend.install()
    replaced = backend._matmul is not None
    backend.uninstall()
    return replaced
