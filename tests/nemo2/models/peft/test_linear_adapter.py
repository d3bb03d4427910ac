# SPDX-License-Identifier: Apache-2.0
"""LoRA on a plain linear layer, without a strategy."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nemo2.base.errors import ConfigError
from nemo2.llm.peft import lora


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [lora.LinearAdapter, lora.patch_linear_module])
def test_a_plain_layer_gets_an_adapter_beside_its_own_parameters(make, bias) -> None:
    layer = nn.Linear(6, 4, bias=bias)
    before, x = copy.deepcopy(layer), torch.randn(3, 6)
    adapted = make(layer, dim=2, alpha=8)
    assert set(adapted.state_dict()) == {*before.state_dict(), "lora_a.weight", "lora_b.weight"}
    torch.testing.assert_close(adapted(x), before(x))  # B is zero
    with torch.no_grad():
        adapted.lora_b.weight.fill_(1.0)
    product = adapted.lora_b.weight @ adapted.lora_a.weight
    torch.testing.assert_close(copy.deepcopy(adapted)(x), before(x) + 4 * x @ product.T)
    adapted(x).sum().backward()
    assert [name for name, one in adapted.named_parameters() if one.grad is not None] == [
        "lora_a.weight",
        "lora_b.weight",
    ]


def test_patching_keeps_the_layer_and_its_weight() -> None:
    layer = nn.Linear(4, 4)
    model, weight = nn.Sequential(layer), layer.weight
    assert lora.patch_linear_module(layer) is layer is model[0] and layer.weight is weight
    assert isinstance(layer, lora.LinearAdapter) and not weight.requires_grad
    layer.eval()
    assert torch.equal(layer(torch.ones(1, 4)), nn.Linear.forward(layer, torch.ones(1, 4)))


@pytest.mark.parametrize(("layer", "settings"), [(nn.Conv1d(1, 1, 1), {}), (nn.Linear(2, 2), {"dim": 0})])
def test_what_gets_no_adapter_is_refused(layer: Any, settings: Any) -> None:
    with pytest.raises(ConfigError):
        lora.LinearAdapter(layer, **settings)
