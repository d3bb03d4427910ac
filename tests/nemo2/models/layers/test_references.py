# SPDX-License-Identifier: Apache-2.0
"""Whole models of these layers against their papers' formulas: loss and the gradient of every parameter."""

from typing import Any

import pytest
import torch

from support.model_samples import MODELS, SIZES, build
from support.plain_decoder import PlainDecoder, loss_of


def compare() -> dict[str, dict[str, float]]:
    """Relative errors of each model."""
    from support.bare_megatron import Settings, random_batches, start_parallel

    answers = {}
    for name in MODELS:
        settings = Settings(**SIZES, gbs=3)
        start_parallel(settings)
        model: Any = build(name, settings, {}, True, True, None)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():  # norms start at one and biases at zero, which would hide a mistake
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("expert_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator).to(buffer)
        batch = random_batches(settings)(0)
        there = {key: value.to(next(model.parameters()).device) for key, value in batch.items()}
        loss = model(there["tokens"], there["position_ids"], None, labels=there["labels"]).mean().cpu()
        loss.backward()

        parameters = dict(model.named_parameters())
        weights = {key: p.detach().cpu().clone().requires_grad_() for key, p in parameters.items()}
        decoder = PlainDecoder(weights | {key: b.cpu().clone() for key, b in model.named_buffers()}, model.config)
        expected = loss_of(decoder, batch)
        (expected + decoder.auxiliary).backward()
        errors = {"loss": float(((loss - expected) / expected).abs())}
        for key, parameter in parameters.items():
            reference = weights[key].grad
            assert parameter.grad is not None and reference is not None, key
            errors[key] = float((parameter.grad.cpu() - reference).norm() / reference.norm())
        answers[name] = errors
    return answers


@pytest.fixture(scope="module")
def errors(run_on_ranks) -> dict[str, dict[str, float]]:
    return run_on_ranks(compare, 1)[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_these_layers_is_that_of_its_paper(errors, model):
    assert errors[model].pop("loss") < 1e-6
    assert max(errors[model].values()) < 1e-5, errors[model]


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("mixtral", ["router.weight", "local_experts.3.linear_fc1.weight"]),
        ("deepseek", ["layers.0.mlp.linear_fc1.weight", "layers.1.mlp.shared_experts.linear_fc2.weight"]),
        ("deepseek", ["linear_q_down_proj.weight", "kv_layernorm.weight"]),
        ("gemma", ["linear_proj.post_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight", "k_layernorm.weight"]),
        ("gpt_oss", ["core_attention.softmax_offset", "local_experts.0.linear_fc2.bias", "router.bias"]),
    ],
)
def test_the_models_have_the_layers_they_are_to_show(errors, model, parts):
    for part in parts:
        assert any(name.endswith(part) for name in errors[model]), part
