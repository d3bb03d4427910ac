# SPDX-License-Identifier: Apache-2.0
"""NeMo's functions over modules."""

from typing import Any

import pytest
from torch import nn

from nemo2.errors import ConfigError
from nemo2.llm import fn


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
    assert leaves == [nn.Linear, nn.ReLU, nn.Linear]

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
