# SPDX-License-Identifier: Apache-2.0
"""One norm for attention and feed-forward: what would run it apart is refused, and recomputation changes nothing."""

from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from nemo2.models.cohere import CohereConfig
from support import hf_parity as parity
from support import small_runs


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    ],
)
def test_settings_that_run_attention_and_feed_forward_apart_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str([*settings][-1])):
        CohereConfig(**small_runs.MODEL, **settings)


def gradients(**settings: Any) -> dict[str, torch.Tensor]:
    parity.start()
    torch.manual_seed(3)
    chunk = CohereConfig(**small_runs.MODEL, **settings).configure_model(None)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    chunk(ids, torch.arange(16).expand_as(ids), None, labels=ids.roll(-1, dims=1)).mean().backward()
    found = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    assert all(
        layer.input_layernorm._output is None for layer in chunk.decoder.layers
    )  # nothing is held until the next step
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def both() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return gradients(), gradients(**whole)


def test_recomputed_layers_have_the_same_gradients(run_on_ranks: Any) -> None:
    ((stored, recomputed),) = run_on_ranks(both, 1)
    norms = [name for name in stored if "input_layernorm" in name]
    assert len(norms) == small_runs.MODEL["num_layers"] and not any(name.endswith("bias") for name in stored)
    assert stored.keys() == recomputed.keys()
    for name in stored:
        torch.testing.assert_close(stored[name], recomputed[name])
