# SPDX-License-Identifier: Apache-2.0
"""Decisions of a GPU machine, by the packages installed there; asked without a GPU."""

import dataclasses
import logging
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo2.base.backend import cuda
from nemo2.base.backend.cuda import CudaBackend


def test_with_transformer_engine_nothing_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "have_te", lambda: True)
    assert CudaBackend().config_overrides() == {}


def test_what_is_turned_off_without_it_names_a_setting_and_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "have_te", lambda: False)
    monkeypatch.setattr(cuda, "has", lambda name: False)
    found = CudaBackend().config_overrides()
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} | {"use_te_rng_tracker"}
    # The second is an option of fused kernels that only some versions have as a field.
    assert set(found) - fields <= {"moe_router_fusion"}
    assert found["gradient_accumulation_fusion"][0] is False
    assert "apply_rope_fusion" in found and "deallocate_pipeline_outputs" not in found
    assert len({reason for _, reason in found.values()}) == len(found)  # each its own
    monkeypatch.setattr(cuda, "has", lambda name: name == "fused_weight_gradient_mlp_cuda")
    assert "gradient_accumulation_fusion" not in CudaBackend().config_overrides()


def test_plain_layers_on_a_gpu_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from nemo2.models.layers import spec
    from nemo2.models.layers.notices import say_once

    made: list[Any] = []
    monkeypatch.setattr(spec, "get_backend", CudaBackend)
    monkeypatch.setattr(spec, "local_layer_spec", lambda config, **rest: made.append(config))
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            spec.layer_spec(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2))
    say_once.cache_clear()
    assert len(made) == 2
    (said,) = [record.getMessage() for record in caplog.records if "plain PyTorch" in record.getMessage()]
    assert "pip install 'transformer-engine[pytorch]" in said and "fp8" in said


def recompute_without_te() -> Any:
    from megatron.core.tensor_parallel import random

    backend = CudaBackend()
    cuda.have_te = lambda: False
    backend.install()
    backend.install()
    return random.CheckpointWithoutOutput(fp8=False).fp8


def test_recomputation_without_transformer_engine_asks_for_no_fp8(run_on_ranks: Any) -> None:
    """Megatron-Core reads ``fp8=False`` as a request, and then a name that Transformer Engine defines."""
    assert run_on_ranks(recompute_without_te, 1, init_process_group=False) == [False]


def optimizers_without_te() -> tuple[str, bool]:
    """The class that Megatron-Core takes for Adam, and whether its optimizer would look for a step in each parameter's state."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    cuda.have_te = lambda: False
    CudaBackend().install()
    return optimizer.Adam.__module__, distrib_optimizer.HAVE_APEX_OR_TE


def test_a_run_without_transformer_engine_keeps_the_optimizer_that_a_checkpoint_can_be_loaded_into(
    run_on_ranks: Any,
) -> None:
    assert run_on_ranks(optimizers_without_te, 1) == [("nemo2.base.backend.fused_adam", True)]
