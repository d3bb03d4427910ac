# SPDX-License-Identifier: Apache-2.0
"""One answer on memory for every command: the rehearsal's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.base.gpus import GIB
from nemo2.cli.app import main
from nemo2.cli.sources import configured
from nemo2.config import apply_overrides
from nemo2.launch import launch
from nemo2.launch.slurm.settings import ClusterSettings
from nemo2.mcore.settle import Machine
from nemo2.preflight.planner import fit
from nemo2.preflight.planner.fit import MARGIN, fit_of
from nemo2.preflight.planner.memory import predict_memory
from nemo2.preflight.planner.peaks import rehearsed
from nemo2.preflight.planner.plan import plan
from nemo2.preflight.rehearse.counts import peak_of
from support.nightly import daily_and_nightly

H100 = Machine.named("H100")


def recipe(name: str, *overrides: str) -> Any:
    made = recipes.get(name).pretrain_recipe()
    return apply_overrides(made, overrides) or made


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEMO_HOME", str(tmp_path))


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a rehearsal starts."""

    def refuse(_: Any) -> None:
        raise AssertionError("a rehearsal started")

    monkeypatch.setattr(fit, "rehearse_ranks", refuse)


@pytest.mark.parametrize("names", daily_and_nightly(rehearsed(), list(rehearsed())[::16]))
def test_check_plan_and_list_never_differ(
    unrehearsed: None, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    assert main(["list", "--json"]) == 0 and main(["list", "--finetune", "--json"]) == 0
    tables = capsys.readouterr().out.replace("]\n[", ",")
    listed = {row["name"]: (row["peak_gib"], row["memory"]) for row in json.loads(tables)}
    for name in names:
        made, peak = configured(name, []), peak_of(rehearsed()[name]["ranks"])
        checked = fit_of(made, H100)
        assert checked is not None and (checked.needed, checked.why) == (peak, ""), name
        assert listed[name] == (round(peak / GIB, 1), checked.answer), name
        try:
            planned = plan(made, check=False)
        except ConfigError:  # the planner has no formula for the speed of such layers
            continue
        assert planned.fit == checked and planned.to_dict()["answer"] == checked.answer, name


def test_every_shipped_recipe_is_in_the_table() -> None:
    assert {name for name in rehearsed() if ":" not in name} == set(recipes.names())


def test_the_formula_is_within_its_margin_of_nearly_all_rehearsals() -> None:
    off = []
    for name, stored in rehearsed().items():
        if ":" not in name:
            try:
                subject = fit.read_recipe(recipe(name), H100.gpu)  # pyright: ignore[reportArgumentType]
            except ConfigError:
                continue
            off.append(predict_memory(subject.shape, subject.job).used / peak_of(stored["ranks"]) - 1)
    assert sum(abs(one) <= MARGIN for one in off) / len(off) >= 0.95


@pytest.mark.parametrize(
    ("overrides", "gpus", "answer"),
    [
        ((), "H100", "fits"),
        ((), "A100-40", "does not fit"),
        (("trainer.max_steps=7", "optim.config.lr=1e-5", "log.name=other"), "H100", "fits"),
    ],
)
def test_what_changes_no_size_is_not_rehearsed_again(overrides, gpus, answer, unrehearsed) -> None:
    found = fit_of(recipe("llama3_8b", *overrides), Machine.named(gpus))
    assert found is not None and (found.answer, found.margin) == (answer, 0.0)


@pytest.mark.parametrize(
    "override",
    [
        "data.micro_batch_size=2",
        "data.seq_length=256",
        "model.config.num_layers=1",
        "optim.config.use_distributed_optimizer=False",
        "strategy.tensor_model_parallel_size=4",
        "trainer.devices=4",
        "trainer.plugins=None",
        "trainer.precision=32",
        "trainer.callbacks=[]",
    ],
)
def test_what_changes_a_size_has_a_key_of_its_own(override: str) -> None:
    assert fit.key_of(recipe("llama_tiny", override)) != fit.key_of(recipe("llama_tiny"))


def test_a_changed_recipe_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rehearse = [], fit.rehearse_ranks
    monkeypatch.setattr(fit, "rehearse_ranks", lambda one: calls.append(one) or rehearse(one))
    changed = recipe("llama3_8b", "model.config.num_layers=2")
    first, again = fit_of(changed, H100), fit_of(changed, H100)
    assert first == again and first is not None and first.why == "" and len(calls) == 1
    assert first.needed < peak_of(rehearsed()["llama3_8b"]["ranks"])


def test_a_rehearsal_prepares_no_data_and_leaves_no_variable(tmp_path: Path) -> None:
    before = dict(os.environ)
    made = fit_of(recipe("llama_tiny", "model.config.num_layers=1"), H100)
    assert made is not None and made.why == ""
    assert {one.name for one in tmp_path.iterdir()} == {"rehearsed"}
    assert dict(os.environ) == before  # Megatron-Core chooses Transformer Engine's attention by variables


@pytest.mark.usefixtures("warm_interpreter")
def test_a_process_that_sees_gpus_rehearses_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipe("llama3_8b", "model.config.num_layers=1")
    here = fit.rehearse_ranks(small)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert fit.rehearse_ranks(small) == here


def test_what_can_not_be_rehearsed_is_estimated_and_says_so() -> None:
    found = fit_of(recipe("llama3_8b", "strategy.fsdp=megatron", "strategy.context_parallel_size=1"), H100)
    assert found is not None and found.margin == MARGIN and "estimated" in found.sentence()


def test_gpus_that_nobody_names_are_assumed_and_cpus_have_no_answer() -> None:
    found = fit_of(recipe("llama3_8b"), Machine())
    assert found is not None and found.assumed and "(assumed)" in found.sentence()
    assert fit_of(recipe("llama_tiny"), Machine(accelerator="cpu")) is None


def test_a_launch_refuses_what_does_not_fit(monkeypatch, capsys, tmp_path) -> None:
    import nemo_run

    executor = nemo_run.SlurmExecutor(
        account="a", partition="p", launcher="torchrun", tunnel=nemo_run.LocalTunnel(job_dir=str(tmp_path))
    )
    large = recipe("llama3_8b", "data.micro_batch_size=2")
    with pytest.raises(ConfigError, match="does not fit.*force=True"):
        launch(large, executor, gpu="H100", dryrun=True)
    assert launch(large, executor, gpu="H100", dryrun=True, force=True).status == "dryrun"
    assert launch(large, executor, dryrun=True).status == "dryrun"  # nobody says which GPUs
    assert capsys.readouterr().err.count("does not fit") == 2
    with pytest.raises(ConfigError, match="gpu"):
        ClusterSettings(gpu="H1000")


def test_what_no_rank_can_build_is_refused(monkeypatch, capsys, tmp_path) -> None:
    import nemo_run

    from nemo2.base.errors import CannotBuild

    override = "model.config.heterogeneous_block_specs=True"
    with pytest.raises(CannotBuild, match=f"^{override}.*accepts {override.replace('True', 'False')}") as refused:
        fit_of(recipe("llama_tiny", override), H100)
    assert refused.value.rule == "ranks-can-be-built"
    assert main(["check", "llama_tiny", override, "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["rule"] == "ranks-can-be-built" and problem["message"].startswith(override)
    executor = nemo_run.SlurmExecutor(
        account="a", partition="p", launcher="torchrun", tunnel=nemo_run.LocalTunnel(job_dir=str(tmp_path))
    )
    with pytest.raises(CannotBuild):
        launch(recipe("llama_tiny", override), executor, gpu="H100", dryrun=True)
    assert launch(recipe("llama_tiny", override), executor, gpu="H100", dryrun=True, force=True).status == "dryrun"
    assert main(["rehearse", "llama_tiny", override]) == 2
    assert override in capsys.readouterr().err


def test_a_callback_that_needs_its_machine_is_no_refusal() -> None:
    class Prepared(Callback):
        def setup(self, *_: Any) -> None:
            raise FileNotFoundError("/cluster/file")

    made = recipe("llama3_8b", "model.config.num_layers=1")
    made.trainer.callbacks.append(Prepared())
    found = fit_of(made, H100)
    assert found is not None and "/cluster/file" in found.why
