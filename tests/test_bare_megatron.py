# SPDX-License-Identifier: Apache-2.0
"""The yardstick itself: every layout of the bare loop trains as one process does, parameter by parameter.

Weights drawn by one process are resharded into each layout, so the runs start from the same model. Single parameters
are compared because the gradient norm hides a wrong one.
"""

from typing import Any

import pytest
import torch

from support.nightly import each_case, requested
from support.resharding import read_tensors

MODEL = {"layers": 4, "steps": 4, "calculate_per_token_loss": True}


def batches_with_a_mask(step: int) -> dict[str, torch.Tensor]:
    """Random tokens, of which the loss skips about a third."""
    from support.bare_megatron import Settings, random_batches

    batch = random_batches(Settings())(step)
    keep = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(step)) > 0.3
    return batch | {"loss_mask": keep.float()}


def train(layout: dict[str, Any]) -> dict[str, Any]:
    from support.bare_megatron import Settings
    from support.bare_megatron import train as train_bare

    return train_bare(Settings(**MODEL | layout))


def run(folder: str, layout: dict[str, Any], *, reference: str | None = None) -> dict[str, Any]:
    """Train and write gradients to `folder`; with a reference start from its weights and add the distance to it."""

    from support.bare_megatron import Settings, train

    settings = Settings(**MODEL | layout)
    keeps_all_gradients = not settings.use_distributed_optimizer
    result = train(
        settings,
        batches_with_a_mask,
        load_weights_from=f"{reference}/weights" if reference else None,
        save_weights_to=None if reference else f"{folder}/weights",
        save_gradients_to=f"{folder}/gradients" if keeps_all_gradients else None,
    )
    if reference and keeps_all_gradients:
        expected, actual = read_tensors(f"{reference}/gradients"), read_tensors(f"{folder}/gradients")
        result["gradient_errors"] = {
            name: float((actual[name] - value).norm() / value.norm()) for name, value in expected.items()
        }
    return result


@pytest.fixture(scope="module")
def single(run_on_ranks, tmp_path_factory) -> tuple[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("single"))
    return folder, run_on_ranks(run, 1, folder, {})[0]


LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2 vp2": {"pp": 2, "vp": 2},
    "dp2": {},
    "dp2 distributed optimizer": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 20_000,
    },
    "cp2": {"cp": 2},
}


OF_FOUR: dict[str, dict[str, Any]] = {
    "tp2 sp pp2 vp2": {"tp": 2, "pp": 2, "vp": 2, "sequence_parallel": True},
    "dp2 pp2 distributed optimizer": {
        "pp": 2,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}


def run_all(folder: str, layouts: dict[str, dict[str, Any]], reference: str) -> dict[str, dict[str, Any]]:
    """Each layout after the other in the same processes."""
    return {name: run(f"{folder}/{name}", layout, reference=reference) for name, layout in layouts.items()}


@pytest.fixture(scope="module")
def on_two(request, run_on_ranks, single, tmp_path_factory) -> list[dict[str, dict[str, Any]]]:
    layouts = {name: LAYOUTS[name] for name in requested(request, "layout")}
    return run_on_ranks(run_all, 2, str(tmp_path_factory.mktemp("two")), layouts, single[0])


@pytest.mark.parametrize("layout", each_case(LAYOUTS, ("tp2 sp", "pp2 vp2", "dp2 distributed optimizer")))
def test_two_ranks_train_as_one(single, on_two, layout):
    _, expected = single
    first, second = (results[layout] for results in on_two)
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert first["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
    if "use_distributed_optimizer" not in LAYOUTS[layout]:
        # Two embeddings, the final norm and six of a layer, those of all layers stacked.
        assert len(first["gradient_errors"]) == 9
        assert max(first["gradient_errors"].values()) < 1e-5, first["gradient_errors"]


@pytest.mark.nightly
def test_four_ranks_train_as_one(run_on_ranks, single, tmp_path):
    folder, expected = single
    for name, first in run_on_ranks(run_all, 4, str(tmp_path), OF_FOUR, folder)[0].items():
        assert first["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
        assert first["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5), name
        assert max(first.get("gradient_errors", {"": 0.0}).values()) < 1e-5, name


OTHER_LAYERS = {"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True, "gated_linear_unit": False}


@pytest.mark.nightly
def test_norms_with_biases_and_norms_of_heads_parallelise_too(run_on_ranks, tmp_path):
    reference, parallel = str(tmp_path / "one"), str(tmp_path / "two")
    layers = {"steps": 2, "config": OTHER_LAYERS | {"bias_activation_fusion": False}}
    expected = run_on_ranks(run, 1, reference, layers)[0]
    layout = layers | {"tp": 2, "sequence_parallel": True}
    first = run_on_ranks(run, 2, parallel, layout, reference=reference)[0]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert {"q_layernorm.bias", "linear_fc1.bias"} <= {
        ".".join(name.split(".")[-2:]) for name in first["gradient_errors"]
    }
    assert max(first["gradient_errors"].values()) < 1e-5, first["gradient_errors"]


def train_in(*variants: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(variant) for variant in variants]


@pytest.mark.nightly
def test_half_precision_recomputation_and_the_optimizers_kind_change_little_or_nothing(run_on_ranks):
    distributed = {"use_distributed_optimizer": True}
    # The mean of a micro-batch rather than the sum, which overflows fp16 at the initial loss scale.
    sixteen = {"dtype": "fp16", "calculate_per_token_loss": False}
    recompute = {
        "config": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]}
    }
    full, bf16, bf16_distributed, fp16, recomputed = run_on_ranks(
        train_in, 1, {}, {"dtype": "bf16"}, {"dtype": "bf16"} | distributed, sixteen | distributed, recompute
    )[0]
    # Not to the bit: gradients are added up in another order.
    assert recomputed["losses"] == pytest.approx(full["losses"], rel=1e-6)
    assert recomputed["grad_norms"] == pytest.approx(full["grad_norms"], rel=1e-6)
    assert bf16_distributed["losses"] == pytest.approx(bf16["losses"], rel=1e-6)
    for half, unit in ((bf16, 2**-8), (fp16, 2**-11)):
        assert half["losses"] == pytest.approx(full["losses"], rel=unit)
        assert half["grad_norms"] == pytest.approx(full["grad_norms"], rel=4 * unit)
        assert half["losses"] != full["losses"]


def test_a_seed_and_a_layout_decide_the_run(run_on_ranks):
    first, again = (run_on_ranks(train, 2, {"tp": 2, "steps": 3}) for _ in range(2))
    other = run_on_ranks(train, 2, {"tp": 2, "steps": 3, "seed": 4321})
    assert first[0]["grad_norms"] == again[0]["grad_norms"]
    assert first[0]["losses"] == again[0]["losses"] != other[0]["losses"]
