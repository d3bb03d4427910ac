# SPDX-License-Identifier: Apache-2.0
"""The search: what it finds is legal, fits, and is what its overrides make."""

import functools

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import gpu
from nemo2.config import apply_overrides
from nemo2.mcore.settle import Machine, on
from nemo2.preflight.checks import find_problems
from nemo2.preflight.planner.page import render_page
from nemo2.preflight.planner.recipe import read_recipe
from nemo2.preflight.planner.search import RECOMPUTATION, Candidate, SearchResult, _as_job, overrides_of, search
from nemo2.preflight.planner.step_time import predict
from support.nightly import each_case


@functools.cache
def found(name: str, gpus: int, *changes: str) -> SearchResult:
    recipe = recipes.get(name).pretrain_recipe()
    apply_overrides(recipe, list(changes))
    return search(read_recipe(on(recipe, Machine(count=gpus)), gpu("H100")), limit=3)


@pytest.mark.parametrize(
    ("name", "gpus"), each_case([("llama3_70b", 64), ("mixtral_8x7b", 32)], [("mixtral_8x7b", 32)])
)
def test_what_is_found_is_legal_and_is_what_its_overrides_make(name: str, gpus: int) -> None:
    result = found(name, gpus)
    assert len(result.best) == 3 and len({one.layout for one in result.best}) == 3
    assert result.best[0].speed >= result.best[1].speed >= result.best[2].speed
    for one in result.best:
        assert one.needed <= 0.95 * gpu("H100").memory
        changed = on(recipes.get(name).pretrain_recipe(), Machine(count=gpus))
        apply_overrides(changed, list(one.overrides))
        assert not find_problems(changed)
        again = read_recipe(changed, gpu("H100"))
        assert again.facts.layout == one.layout and again.job.micro_batch == one.job.micro_batch
        assert again.job.recompute == one.job.recompute


@pytest.mark.parametrize(
    "requested",
    [
        ("recompute_granularity=full", "recompute_method=block", "recompute_num_layers=8"),
        ("cpu_offloading=True", "cpu_offloading_num_layers=20"),
    ],
)
def test_overrides_undo_what_the_recipe_recomputes_or_offloads(requested: tuple[str, ...]) -> None:
    """Selected modules beside a number of layers, and recomputation beside offloading, are refused by Megatron-Core."""
    changes = ["strategy.context_parallel_size=1", *(f"model.config.{one}" for one in requested)]
    recipe = recipes.get("llama3_8b").pretrain_recipe()
    apply_overrides(recipe, changes)
    subject = read_recipe(on(recipe, Machine(count=8)), gpu("H100"))
    layout, micro = subject.facts.layout, subject.job.micro_batch
    for recompute in RECOMPUTATION:
        job = _as_job(subject.job, layout, micro, recompute)
        one = Candidate(layout=layout, job=job, step=predict(subject.shape, job), needed=0.0)
        changed = recipes.get("llama3_8b").pretrain_recipe()
        apply_overrides(changed, [*changes, *overrides_of(subject, one)])
        assert not find_problems(on(changed, Machine(count=8)))
        again = read_recipe(on(changed, Machine(count=8)), gpu("H100")).job
        assert (again.recompute, again.offloaded_layers) == (one.job.recompute, one.job.offloaded_layers)


def test_no_legal_layout_that_fits_is_faster_than_the_best() -> None:
    result = found("mixtral_8x7b", 32)
    unchanged = result.unchanged
    if unchanged.needed <= 0.95 * gpu("H100").memory:
        assert result.best[0].speed >= 0.99 * unchanged.speed
    assert result.best[0].speed <= max(one.speed for one in result.tried)


def test_a_model_that_is_too_large_says_how_much_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"fits in memory: the smallest needs \d+ GiB per GPU, and 75 GiB are usable"):
        found("llama31_405b", 8, "data.global_batch_size=8")


def test_a_batch_that_nothing_divides_says_so() -> None:
    with pytest.raises(ConfigError, match="No layout of .* splits data.global_batch_size="):
        found("llama3_8b", 2048, "data.global_batch_size=1")


def test_the_page_shows_what_was_found() -> None:
    result = found("mixtral_8x7b", 32)
    page = render_page(result, title="mixtral_8x7b")
    assert (
        "<svg" in page
        and result.best[0].layout.describe(32) in page
        and "http" not in page.replace("http://www.w3.org", "")
    )
