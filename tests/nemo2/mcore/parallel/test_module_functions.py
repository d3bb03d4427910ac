# SPDX-License-Identifier: Apache-2.0
"""NeMo's functions over modules."""

from typing import Any

import pytest
import torch
from torch import nn

from nemo2.base.errors import ConfigError
from nemo2.llm import fn
from support import small_runs


class Net(fn.FNMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.again = self.inner[0]
        self.out = nn.Linear(3, 2)


def replaced(module: nn.Module) -> nn.Module:
    return nn.Tanh() if isinstance(module, nn.ReLU) else module


def test_walk_reaches_every_module_and_map_only_children() -> None:
    mapped, walked = Net().map(replaced), Net().walk(replaced)
    assert isinstance(mapped.inner[1], nn.ReLU) and isinstance(walked.inner[1], nn.Tanh)


def test_a_function_gets_the_place_that_it_asks_for_and_each_module_once() -> None:
    seen: list[tuple[str, str, int]] = []

    def look(module: nn.Module, name: str = "", prefix: str = "", i: int = -1) -> nn.Module:
        seen.append((prefix, name, i))
        return module

    fn.walk(Net(), look)
    assert seen == [("", "", -1), ("", "inner", 0), ("inner", "0", 0), ("inner", "1", 1), ("", "out", 2)]


def test_only_leaves_and_what_replaced_a_parent_is_walked_into() -> None:
    leaves: list[type] = []

    def note(module: nn.Module) -> nn.Module:
        leaves.append(type(module))
        return module

    fn.walk(Net(), note, leaf_only=True)
    assert leaves == [nn.Linear, nn.Linear]  # those with parameters of their own, as in NeMo

    def twice(module: nn.Module) -> nn.Module:
        return nn.Sequential(nn.ReLU()) if isinstance(module, nn.Linear) else replaced(module)

    assert isinstance(fn.walk(Net(), twice).out[0], nn.Tanh)  # pyright: ignore[reportIndexIssue]


def test_a_function_that_returns_no_module_is_named() -> None:
    def broken(module: Any) -> Any:
        return None

    with pytest.raises(ConfigError, match=r"broken returned NoneType\. It must return a module"):
        fn.walk(Net(), broken)


def test_forall_and_freezing() -> None:
    net = Net()
    assert fn.forall(net, lambda module: isinstance(module, Net)) and not net.forall(
        lambda m: isinstance(m, Net), recurse=True
    )
    net.freeze()
    assert not any(parameter.requires_grad for parameter in net.parameters())
    net.unfreeze()
    assert all(parameter.requires_grad for parameter in net.parameters())


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.inner = inner


def test_a_function_that_wraps_its_argument_wraps_each_module_once() -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return Wrapper(module) if isinstance(module, nn.Linear) else module

    net = fn.walk(Net(), wrap)
    assert isinstance(net.out, Wrapper) and isinstance(net.out.inner, nn.Linear)
    assert net.inner[0] is net.again and isinstance(net.again.inner, nn.Linear)  # pyright: ignore
    assert len(list(net.parameters())) == 8

    for function in (fn.walk, fn.map):
        root: Any = function(nn.Linear(2, 2), Wrapper)
        assert isinstance(root, Wrapper) and type(root.inner) is nn.Linear
    whole: Any = fn.walk(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), Wrapper)
    assert [type(one) for one in whole.modules()].count(Wrapper) == 3
    assert sum(one.numel() for one in whole.parameters()) == 6 + 3 * 2


class Scaled(nn.Module):
    """A linear layer of Megatron-Core's, whose output is multiplied by a trained number."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped, self.scale = wrapped, nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, bias = self.wrapped(*args, **kwargs)
        return output * self.scale, bias


def wrap(module: nn.Module, name: str = "") -> nn.Module:
    return Scaled(module) if name == "linear_proj" else module


def train_wrapped() -> dict[str, Any]:
    """The losses with and without the wrappers, the wrappers' numbers after training, and the sizes of both models."""
    plain, wrapped = small_runs.build_llama(), small_runs.build_llama()
    wrapped.model_transform = lambda chunk: fn.walk(chunk, wrap)
    found: dict[str, Any] = {}
    for name, model in {"plain": plain, "wrapped": wrapped}.items():
        torch.manual_seed(1)
        run = small_runs.fit(model, max_steps=3, tensor_model_parallel_size=2, inspect=small_runs.parameters)
        found[name] = run["losses"], run["inspected"]
        small_runs.release()
    return found


def test_a_model_whose_modules_are_wrapped_by_a_walk_trains(run_on_ranks: Any) -> None:
    found = run_on_ranks(train_wrapped, 2)[0]
    (losses, parameters), (plain_losses, plain) = found["wrapped"], found["plain"]
    assert losses[0] == plain_losses[0] and losses[1:] != plain_losses[1:]
    scales = {name: value for name, value in parameters.items() if name.endswith(".scale")}
    layers = small_runs.MODEL["num_layers"]
    assert len(scales) == layers and len(parameters) == len(plain) + layers
    assert all(value.item() != 1.0 for value in scales.values())
