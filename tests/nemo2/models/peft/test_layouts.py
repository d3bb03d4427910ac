# SPDX-License-Identifier: Apache-2.0
"""Each method trains the same in every layout, and its checkpoints go on in another one."""

from typing import Any

import pytest

from support import adapted_runs, transformed_runs
from support.nightly import daily_and_nightly, each_case, requested
from support.transformed_runs import EXPERTS, LAST_STEP, STEPS

PROJECTIONS = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]
ATTENTION: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "latent": ("DoRA", PROJECTIONS, {"latent": True, "num_query_groups": None}),
    "with a gate": ("CanonicalDoRA", ["linear_q", "linear_v"], {"attention_output_gate": True}),
}
"""Models with other attention, each with a method and its targets."""
ONLY_EXPERTS = {"target_modules": ["*.experts.*.linear_fc1", "*.experts.*.linear_fc2"]}
LATE = {"target_modules": ["*.layers.3.*"]}
GATED: dict[str, Any] = {"gated_linear_unit": True}
RUNS = [
    *(("LoRA", name) for name in adapted_runs.LAYOUTS),
    *((kind, name) for kind in ("DoRA", "CanonicalLoRA", "CanonicalDoRA") for name in ("tp2 sp", "pp2 vp2", "fsdp2")),
]
DAILY = [("LoRA", name) for name in ("tp2", "cp2", "pp2 vp2", "do")]
DAILY += [("CanonicalDoRA", name) for name in ("tp2 sp", "fsdp2")]
"""CanonicalDoRA has what DoRA and CanonicalLoRA add; another transform trains every day in the forms of FSDP that are left out
(tests/nemo2/mcore/parallel/test_transform.py)."""


def one_process(directory: str) -> dict[Any, Any]:
    transformed_runs.base(f"{directory}/dense")
    found: dict[Any, Any] = {}
    for kind in ("LoRA", "DoRA", "CanonicalDoRA"):
        place = f"{directory}/{kind}"
        found[kind] = adapted_runs.train(f"{directory}/dense", kind, to=place, save=True)
        found[kind, "resumed"] = adapted_runs.train(f"{directory}/dense", kind, resume=f"{place}/one/step={STEPS}")
    for attention, (_, _, config) in ATTENTION.items():
        transformed_runs.base(f"{directory}/{attention}", **config)
        found[attention] = of_attention(directory, attention)
    transformed_runs.base(f"{directory}/experts", **EXPERTS | GATED)
    found["experts"] = adapted_runs.train(
        f"{directory}/experts", "LoRA", to=f"{directory}/E", save=True, **EXPERTS | GATED
    )
    only, place = {"options": ONLY_EXPERTS, **EXPERTS | GATED}, f"{directory}/only experts"
    found["only experts"] = adapted_runs.train(f"{directory}/experts", "LoRA", to=place, save=True, **only)
    found["only experts", "resumed"] = adapted_runs.train(
        f"{directory}/experts", "LoRA", resume=f"{place}/one/step={STEPS}", **only
    )
    found["late"] = adapted_runs.train(f"{directory}/dense", "LoRA", options=LATE, to=f"{directory}/late", save=True)
    return found


def of_attention(directory: str, attention: str, name: str = "") -> dict[str, Any]:
    kind, targets, config = ATTENTION[attention]
    return adapted_runs.train(f"{directory}/{attention}", kind, name, options={"target_modules": targets}, **config)


def alone(directory: str, kinds: list[str]) -> dict[Any, Any]:
    return {kind: adapted_runs.train(f"{directory}/dense", kind) for kind in kinds}


def trained(directory: str, runs: list[tuple[str, str]]) -> dict[Any, Any]:
    return {(kind, name): adapted_runs.train(f"{directory}/dense", kind, name) for kind, name in runs}


def two_ranks(directory: str, resumed: list[tuple[str, str]], layers: list[int]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind, name in resumed:
        found[kind, name, "resumed"] = adapted_runs.train(
            f"{directory}/dense", kind, name, resume=f"{directory}/{kind}/one/step={STEPS}"
        )
    for attention in ATTENTION:
        found[attention] = of_attention(directory, attention, "tp2 sp")
    for name in OF_EXPERTS:
        found["experts", name] = adapted_runs.train(f"{directory}/experts", "LoRA", name, **EXPERTS | GATED)
    resume = f"{directory}/only experts/one/step={STEPS}"
    only = {"options": ONLY_EXPERTS, "resume": resume, **EXPERTS | GATED}
    found["only experts"] = adapted_runs.train(f"{directory}/experts", "LoRA", "ep2", **only)
    found["late"] = adapted_runs.train(
        f"{directory}/dense", "LoRA", "pp2", options=LATE, to=f"{directory}/l", save=True
    )
    for layer in layers:
        options = {"target_modules": [f"*.layers.{layer}.*"]}
        half: dict[str, Any] = {
            "options": options,
            "strategy": adapted_runs.LAYOUTS["pp2"] | {"precision": "bf16-mixed"},
        }
        place = f"{directory}/half {layer}"
        found["half", layer] = adapted_runs.train(f"{directory}/dense", "LoRA", "pp2", steps=LAST_STEP, **half)
        adapted_runs.train(f"{directory}/dense", "LoRA", "pp2", to=place, save=True, **half)
        found["half", layer, "resumed"] = adapted_runs.train(
            f"{directory}/dense", "LoRA", "pp2", resume=f"{place}/pp2/step={STEPS}", **half
        )
    return found


ON_ONE_STAGE = (0, 3)
"""Layers of the first and of the second of two stages."""
RESUMED = [("LoRA", "tp2 sp"), ("CanonicalDoRA", "tp2 sp"), ("LoRA", "pp2"), ("DoRA", "fsdp2")]
OF_EXPERTS = ("ep2", "etp2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def one(run_on_ranks, directory) -> dict[Any, Any]:
    return run_on_ranks(one_process, 1, directory)[0]


@pytest.fixture(scope="module")
def runs(request, run_on_ranks, directory, one) -> dict[str, list[dict[Any, Any]]]:
    resumed, layers = requested(request, "kind", "begun"), requested(request, "layer")
    return {"one": [one], "two": run_on_ranks(two_ranks, 2, directory, resumed, layers)}


@pytest.mark.parametrize("layouts", daily_and_nightly(RUNS, DAILY))
def test_every_layout_trains_as_one_process_and_leaves_the_base_alone(run_on_ranks, directory, one, layouts):
    others = sorted({kind for kind, _ in layouts} - one.keys())
    references = {**one, **run_on_ranks(alone, 1, directory, others)[0]} if others else one
    for rank in run_on_ranks(trained, 2, directory, layouts):
        for (kind, name), run in rank.items():
            expected = references[kind]
            assert len(set(expected["losses"])) == STEPS
            assert run["losses"] == pytest.approx(expected["losses"], rel=2e-5), (kind, name)
            assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4), (kind, name)
            assert run["counts"] == expected["counts"], (kind, name)
            assert all(".adapter." in key for key in run["changed"]), (kind, name)
            assert not any(".adapter." in key for key in run["same"]), (kind, name)


@pytest.mark.parametrize(("kind", "begun"), each_case(RESUMED, RESUMED[1:2] + RESUMED[3:]))
def test_a_layout_goes_on_from_a_checkpoint_of_one_process(runs, kind, begun):
    expected = runs["one"][0][kind, "resumed"]
    for rank in runs["two"]:
        assert rank[kind, begun, "resumed"]["losses"] == pytest.approx(expected["losses"], rel=5e-5)


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_every_expert_has_an_addition_of_its_own_on_whatever_rank_it_is(runs, name):
    expected = runs["one"][0]["experts"]
    for rank in runs["two"]:
        run = rank["experts", name]
        assert run["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
        assert run["counts"] == expected["counts"]


@pytest.mark.parametrize("attention", ATTENTION)
def test_other_attention_trains_as_one_process(runs, attention):
    """Latent attention has additions beside layers that all ranks have."""
    expected = runs["one"][0][attention]
    for rank in runs["two"]:
        run = rank[attention]
        assert run["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert run["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)
        assert run["counts"] == expected["counts"]
        assert all(".adapter." in key for key in run["changed"])
        assert attention != "latent" or any("linear_q_down_proj.adapter" in key for key in run["changed"])


def test_additions_beside_experts_alone_are_saved_and_resumed_on_other_ranks(runs):
    """The dense parameters' optimizer has nothing to update, then."""
    expected = runs["one"][0]["only experts", "resumed"]
    for rank in runs["two"]:
        assert rank["only experts"]["losses"] == pytest.approx(expected["losses"], rel=5e-5)


def test_a_stage_without_additions_trains_and_saves_with_the_others(runs):
    expected = runs["one"][0]["late"]
    for rank in runs["two"]:
        assert rank["late"]["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert rank["late"]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


@pytest.mark.parametrize("layer", each_case(ON_ONE_STAGE, ON_ONE_STAGE[1:]))
def test_a_stage_without_additions_goes_on_with_the_others_in_half_precision(runs, layer):
    """Its optimizer has no fp32 copies of parameters, and the plain part of a checkpoint is one rank's for all."""
    for rank in runs["two"]:
        whole, resumed = rank["half", layer]["losses"], rank["half", layer, "resumed"]["losses"]
        assert len(whole) == LAST_STEP and resumed == whole[STEPS:]
