# SPDX-License-Identifier: Apache-2.0
"""Quick answers on memory against the rehearsals of every shipped recipe."""

import statistics
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.config import apply_overrides
from nemo2.errors import ConfigError
from nemo2.launch import launch
from nemo2.launch.slurm.start import ClusterSettings
from nemo2.planner.peaks import rehearsed
from nemo2.planner.quick import MARGIN, quick_verdict
from nemo2.settle import Machine


def recipe(name: str, *overrides: str) -> Any:
    made = recipes.get(name).pretrain_recipe()
    return apply_overrides(made, overrides) or made


def test_the_formula_is_within_its_margin_of_nearly_all_rehearsals() -> None:
    off = [one["formula"] / one["peak"] - 1 for one in rehearsed().values()]
    assert len(off) > 200
    assert statistics.median(map(abs, off)) < 0.06
    assert sum(abs(one) <= MARGIN for one in off) / len(off) >= 0.95


def test_every_shipped_recipe_is_in_the_table() -> None:
    assert {name for name in rehearsed() if ":" not in name} == set(recipes.names())


@pytest.mark.parametrize(
    ("name", "overrides", "gpus", "answer", "rehearsed"),
    [
        ("llama3_8b", (), "H100", "fits", True),
        ("llama3_70b", (), "H100", "tight", True),
        ("llama3_70b", ("data.micro_batch_size=2",), "H100", "does not fit", False),
        ("llama3_70b", ("data.micro_batch_size=2",), "B200", "fits", False),
        ("llama3_8b", (), "A100-40", "does not fit", True),
        ("llama3_8b", ("trainer.max_steps=7",), "H100", "fits", True),  # memory doesn't follow from it
    ],
)
def test_an_answer_is_the_rehearsals_or_scaled_to_it(name, overrides, gpus, answer, rehearsed) -> None:
    found = quick_verdict(recipe(name, *overrides), Machine.named(gpus), name=name)
    assert found is not None
    assert (found.answer, found.margin == 0.0) == (answer, rehearsed)
    assert f"nemo2 rehearse {name}" in found.sentence(name) or answer == "fits"


def test_gpus_that_nobody_names_are_assumed_and_cpus_have_no_answer() -> None:
    found = quick_verdict(recipe("llama3_8b"), Machine())
    assert found is not None and found.assumed and "(assumed)" in found.sentence()
    assert quick_verdict(recipe("llama_tiny"), Machine(accelerator="cpu")) is None


def test_a_launch_refuses_what_does_not_fit_by_far(monkeypatch, capsys, tmp_path) -> None:
    import nemo_run

    executor = nemo_run.SlurmExecutor(
        account="a", partition="p", launcher="torchrun", tunnel=nemo_run.LocalTunnel(job_dir=str(tmp_path))
    )
    large = recipe("llama3_70b", "data.micro_batch_size=2")
    with pytest.raises(ConfigError, match="does not fit.*within 10%.*--force"):  # 10%: as `nemo2 check` says
        launch(large, executor, gpu="H100", dryrun=True)
    assert launch(large, executor, gpu="H100", dryrun=True, force=True).status == "dryrun"
    assert launch(large, executor, dryrun=True).status == "dryrun"  # nobody says which GPUs
    assert capsys.readouterr().err.count("does not fit") == 2
    with pytest.raises(ConfigError, match="gpu"):
        ClusterSettings(gpu="H1000")
