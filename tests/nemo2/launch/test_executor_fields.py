# SPDX-License-Identifier: Apache-2.0
"""Fields of nemo-run's executors: each of them takes effect, is refused, or is said to have no effect."""

from dataclasses import fields

import nemo_run
import pytest
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, SlurmTemplate, Torchrun
from nemo_run.core.execution.slurm import SlurmJobDetails

from nemo2.base.errors import ConfigError
from nemo2.config import Partial
from nemo2.launch import launch
from nemo2.launch.executor_fields import start_with_torchrun
from nemo2.recipes import llama_tiny

SLURM = {
    **dict.fromkeys(("account", "partition", "qos", "mem", "mem_per_gpu", "mem_per_cpu", "comment"), "odd"),
    **dict.fromkeys(("constraint", "exclude", "gres", "network", "job_name_prefix", "open_mode"), "odd"),
    **dict.fromkeys(("cpus_per_task", "cpus_per_gpu", "gpus_per_node", "gpus_per_task", "segment", "retries"), 3),
    **dict.fromkeys(("wait_time_for_group_job", "monitor_group_job_wait_time"), 3),
    **dict.fromkeys(("nodes", "ntasks_per_node", "torchrun_nproc_per_node"), 3),
    "time": 45,
    "signal": "USR2@90",
    "exclusive": "user",
    "array": "0-3",
    "container_image": "image",
    "container_mounts": ["/a:/b"],
    "container_env": ["A"],
    "additional_parameters": {"reservation": "odd"},
    "srun_args": ["--mpi=pmix"],
    "heterogeneous": True,
    "het_group_indices": [0],
    "memory_measure": True,
    "job_details": SlurmJobDetails(folder="/odd"),
    "dependencies": ["slurm://a/1"],
    "dependency_type": "afterany",
    "monitor_group_job": False,
    "setup_lines": "export A=1",
    "ray_template": "odd",
    "launcher": None,
    "env_vars": {"A": "1"},
    "tunnel": nemo_run.LocalTunnel(job_dir="/odd"),
    "packager": None,  # what is shipped, `test_slurm`
    "experiment_id": None,
    "job_dir": None,  # nemo-run's own, as the one before
    "poll_estimated_start_time": None,  # nemo2 never asks for it
}
"""A value for each field that isn't its default. None of it: it can't be seen in a dry run."""


def work(trainer=None, log=None):
    """Stands for an entry point."""


def slurm(**arguments):
    return nemo_run.SlurmExecutor(**{"account": "a", "time": "1:00:00", "launcher": "torchrun", **arguments})


def dry(executor, recipe=None, **arguments):
    launch(
        recipe or llama_tiny.pretrain_recipe(), executor, dryrun=True, quiet=True, check=False, gpu="H100", **arguments
    )


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    monkeypatch.setattr("nemo2.launch.slurm.start.timestamp", lambda: "then")


def test_each_field_of_a_slurm_executor_arrives_or_is_told(capsys):
    assert {field.name for field in fields(nemo_run.SlurmExecutor) if field.init} == SLURM.keys()
    dry(slurm())
    undisturbed = capsys.readouterr()
    for name, value in SLURM.items():
        if value is None and name != "launcher":
            continue
        try:
            dry(slurm(**{name: value}))
        except ConfigError as error:
            assert f"SlurmExecutor.{name}" in str(error)
            continue
        answer = capsys.readouterr()
        if answer.out == undisturbed.out:
            assert f"warning: SlurmExecutor.{name}=" in answer.err
        else:
            assert f"SlurmExecutor.{name}" not in answer.err.replace("SlurmExecutor.signal", "")


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (nemo_run.LocalExecutor(retries=2), "LocalExecutor.retries=2 has no effect"),
        (nemo_run.LocalExecutor(env_vars={"RANK": "1"}), "RANK='1' has no effect"),
        (nemo_run.LocalExecutor(env_vars={"MASTER_PORT": 1234}), "MASTER_PORT='1234' has no effect"),
        (slurm(env_vars={"LIBS": "/opt:$LIBS"}), "LIBS='/opt:$LIBS' reaches the ranks as it is"),
        (slurm(launcher=Torchrun(rdzv_backend="etcd")), "launcher.rdzv_backend='etcd' has no effect"),
        (slurm(launcher=Torchrun(nsys_profile=True, nsys_folder="x")), "launcher.nsys_folder='x' has no effect"),
    ],
)
def test_a_setting_without_effect_is_told(capsys, executor, words):
    dry(executor)
    assert f"warning: {words}" in capsys.readouterr().err.replace("env: ", "").replace(
        "SlurmExecutor.launcher", "launcher"
    )


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (slurm(srun_args="--mpi=pmix"), "SlurmExecutor.srun_args='--mpi=pmix': must be a list"),
        (slurm(gpus_per_node="8"), "gpus_per_node='8': must be a whole number"),
        (slurm(setup_lines=["a"]), "setup_lines=.*must be text"),
        (slurm(additional_parameters=["a"]), "additional_parameters=.*must be a dictionary"),
        (
            nemo_run.DockerExecutor(container_image="i", volumes="/a:/b"),
            "DockerExecutor.volumes='/a:/b': must be a list",
        ),
        (nemo_run.LocalExecutor(launcher="slurm_ray"), "LocalExecutor.launcher='slurm_ray': must be 'torchrun'"),
        (nemo_run.LocalExecutor(launcher="torchrn"), "launcher='torchrn'"),
        (nemo_run.LocalExecutor(launcher=SlurmTemplate(template_inline="x")), "LocalExecutor.launcher=SlurmTemplate"),
        (nemo_run.LocalExecutor(nodes=0), "LocalExecutor.nodes=0: must be a whole number"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(executor, words):
    with pytest.raises(ConfigError, match=words):
        dry(executor)


@pytest.mark.parametrize("by", ["executor", "env"])
@pytest.mark.parametrize(
    "variables", [{"A B": "x"}, {"": "x"}, {"A": None}, {"A": True}, {"A": "\0"}, {"A": ["x"]}, {"MASTER_PORT": "http"}]
)
def test_variables_that_a_process_cant_have_are_refused_on_every_executor(variables, by):
    for make in (slurm, nemo_run.LocalExecutor):
        executor = make(env_vars=variables if by == "executor" else {})
        with pytest.raises(ConfigError, match=f"env: '?{next(iter(variables))}"):
            dry(executor, env=variables if by == "env" else None)
    with pytest.raises(ConfigError) as caught:
        dry(slurm(env_vars={"HF_TOKEN": ["canary"]}))
    assert "canary" not in str(caught.value)


def test_variables_that_are_numbers_become_text(capsys):
    dry(slurm(env_vars={"N": 3}), env={"M": 0.5})
    assert "export M=0.5\nexport N=3\n" in capsys.readouterr().out.replace("export NVTE", "\nexport NVTE")


@pytest.mark.parametrize(
    "executor",
    [nemo_run.LocalExecutor(nodes=2), slurm(nodes=2), slurm(ntasks_per_node=4), slurm(torchrun_nproc_per_node=4)],
)
def test_an_executor_of_another_shape_than_the_trainers_is_refused_unless_the_launch_names_it(executor, capsys):
    with pytest.raises(ConfigError, match=r"=[24], but the run has [12] \(trainer\.(num_nodes|devices)\)"):
        dry(executor)
    dry(executor, nodes=1, devices=2)
    assert "2" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", [None, Launcher(nsys_profile=True, nsys_trace=["cuda"])])
def test_an_executor_without_a_launcher_starts_torchrun_except_slurms(launcher):
    for executor in (nemo_run.LocalExecutor(launcher=launcher), nemo_run.DockerExecutor(container_image="i")):
        start_with_torchrun(executor)
        assert type(executor.launcher) is Torchrun
    executor = nemo_run.LocalExecutor(launcher=launcher)
    start_with_torchrun(executor)
    assert executor.launcher.nsys_trace == (["cuda"] if launcher else Torchrun().nsys_trace)
    start_with_torchrun(executor := slurm(launcher=None))
    assert executor.launcher is None
    start_with_torchrun(executor := slurm(launcher=FaultTolerance()))
    assert type(executor.launcher) is FaultTolerance


def test_a_plugin_leaves_every_rank_to_torchrun(capsys):
    """nemo-run's `get_launcher`, which plugins call, sets a launcher that starts one process."""
    from nemo2.plugins import FaultTolerancePlugin

    dry(nemo_run.LocalExecutor(), plugins=[FaultTolerancePlugin(resiliency_ext=False, num_job_retries_on_failure=0)])
    answer = capsys.readouterr()
    assert "torchrun --nnodes 1 --nproc-per-node 2" in answer.out and "LocalExecutor.retries" not in answer.err


def test_a_task_without_a_trainer_runs_on_one_process(capsys):
    dry(nemo_run.LocalExecutor(), Partial(work))
    assert "--nproc-per-node 1" in capsys.readouterr().out
