# SPDX-License-Identifier: Apache-2.0
"""Fields of nemo-run's executors: each of them takes effect, is refused, or is said to have no effect."""

import inspect
import re
import subprocess
from contextlib import nullcontext
from dataclasses import fields
from importlib import import_module

import nemo_run
import pytest
from nemo_run.core.execution.launcher import FaultTolerance, Launcher, SlurmTemplate, Torchrun
from nemo_run.core.execution.slurm import SlurmJobDetails

from nemo2.base.errors import ConfigError
from nemo2.config import Partial
from nemo2.launch import launch
from nemo2.launch.executor_fields import check_fields, start_with_torchrun, warn_of_unused_fields
from nemo2.launch.launcher import check_gpus
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


CLOUD = {
    **dict.fromkeys(("base_url", "kube_apiserver_url", "client_id", "client_secret", "project_name"), "x"),
    "container_image": "i",
    "pvc_nemo_run_dir": "/p",
}
LEPTON = {"node_group": "g", "resource_shape": "gpu.8xh100-sxm"}
ENGINES = {
    "docker": ("DockerExecutor", {"container_image": "i"}),
    "skypilot": ("SkypilotExecutor", {}),
    "skypilot_jobs": ("SkypilotJobsExecutor", {}),
    "dgxcloud": ("DGXCloudExecutor", CLOUD),
    "lepton": ("LeptonExecutor", {"container_image": "i", "nemo_run_dir": "/p", **LEPTON}),
}
"""nemo-run's modules of executors that run through its experiment, with the fields that each requires."""
NOT_TOLD = {"kube_apiserver_url"}
"""It is required, though nothing reads it."""


def engine(kind, **arguments):
    name, required = ENGINES[kind]
    return getattr(nemo_run, name)(**{**required, **arguments})


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
    for kind in ("skypilot", "skypilot_jobs"):  # the package isn't needed to make one
        monkeypatch.setattr(f"nemo_run.core.execution.{kind}._SKYPILOT_AVAILABLE", True)


@pytest.mark.parametrize(("job_dir", "legal"), [("jobs", False), ("~/jobs", False), ("/jobs", True), ("", True)])
def test_the_folder_of_slurms_jobs_is_absolute(job_dir, legal):
    with nullcontext() if legal else pytest.raises(ConfigError, match="tunnel.job_dir"):
        check_fields(slurm(tunnel=nemo_run.LocalTunnel(job_dir=job_dir)))


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


@pytest.mark.parametrize("kind", ENGINES)
def test_each_field_that_nemo_run_never_reads_is_told(kind, capsys):
    executor = engine(kind)
    modules = [f"nemo_run.core.execution.{kind}", f"nemo_run.run.torchx_backend.schedulers.{kind}"]
    source = "".join(inspect.getsource(import_module(module)) for module in modules)
    for field in fields(executor):
        if not field.init or field.name in NOT_TOLD or field.name == "launcher":
            continue
        if re.search(rf"[.\"]{field.name}\b(?!=)", source) and field.name != "queue_priority":
            continue
        value = [7] if "list" in str(field.type) else not field.default if isinstance(field.default, bool) else "odd"
        setattr(executor, field.name, value)
        warn_of_unused_fields(executor)
        assert f"warning: {type(executor).__name__}.{field.name}={value!r} has no effect" in capsys.readouterr().err
        setattr(executor, field.name, getattr(engine(kind), field.name))
    warn_of_unused_fields(executor)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "launcher", "name"),
    [
        ("docker", Torchrun(rdzv_port=4), "rdzv_port"),
        ("dgxcloud", Torchrun(rdzv_id=4), "rdzv_id"),
        ("lepton", Torchrun(rdzv_backend="etcd"), "rdzv_backend"),
        ("dgxcloud", Torchrun(nsys_profile=True, nsys_gpu_metrics=True), "nsys_gpu_metrics"),
        ("docker", FaultTolerance(cfg_path="/x"), "cfg_path"),
    ],
)
def test_each_setting_of_a_launcher_that_nothing_reads_is_told(kind, launcher, name, capsys):
    warn_of_unused_fields(engine(kind, launcher=launcher))
    assert f"Executor.launcher.{name}={getattr(launcher, name)!r} has no effect: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("docker", {"retries": 2}, "retries=2: Docker refuses to restart"),
        ("docker", {"ulimits": ["memlock=-1"]}, "ulimits: 'memlock=-1' must be NAME:SOFT"),
        ("docker", {"additional_kwargs": {"volumes": []}}, "additional_kwargs would replace volumes .* Set volumes"),
        ("docker", {"additional_kwargs": {"name": "x"}}, "additional_kwargs would replace name .* Leave it out"),
        ("docker", {"additional_kwargs": {"device_requests": []}, "num_gpus": 2}, "device_requests .* Set num_gpus"),
        ("docker", {"launcher": Launcher(nsys_profile=True)}, "nsys would write its recordings"),
        ("skypilot", {"launcher": Torchrun(nsys_profile=True)}, "nsys would write its recordings"),
        ("dgxcloud", {"custom_spec": {"command": "x"}}, "custom_spec would replace command"),
        ("dgxcloud", {"custom_spec": {"compute": {}}, "gpus_per_node": 8}, "would replace compute .* gpus_per_node"),
        ("lepton", {"mounts": [{"path": "/x"}]}, "LeptonExecutor.mounts: .* has no mount_path"),
        ("dgxcloud", {"pvcs": [{}]}, "DGXCloudExecutor.pvcs: {} has no path"),
        ("lepton", {"mounts": [None]}, "LeptonExecutor.mounts: None has no path and no mount_path"),
        ("lepton", {"node_group": ""}, "LeptonExecutor.node_group='': must be set"),
        ("lepton", {"resource_shape": " "}, "LeptonExecutor.resource_shape=' ': must be set"),
        ("dgxcloud", {"project_name": None}, "DGXCloudExecutor.project_name=None: must be set"),
        ("docker", {"container_image": ""}, "DockerExecutor.container_image='': must be set"),
        ("docker", {"volumes": [7]}, "DockerExecutor.volumes.0.=7: takes text"),
        ("docker", {"retries": None}, "DockerExecutor.retries=None: takes a whole number"),
        ("lepton", {"launcher": "ft"}, "LeptonExecutor.launcher: .* without the address of rank 0"),
        ("lepton", {"launcher": FaultTolerance()}, "without the address of rank 0"),
        (
            "lepton",
            {"launcher": Torchrun(nsys_trace="cuda")},
            "LeptonExecutor.launcher.nsys_trace='cuda': takes a list",
        ),
        ("lepton", {"shared_memory_size": 0, "nodes": -1}, "nodes=-1: .*\n.*shared_memory_size=0: .* at least 1"),
        ("skypilot", {"cpus": [4, -1]}, "cpus=.4, -1.: must be above 0"),
        ("skypilot", {"gpus": ["A100", 3]}, "gpus.1.=3: takes text"),
        ("docker", {"launcher": FaultTolerance(max_restarts=-1)}, "launcher.max_restarts=-1: .* at least 0"),
    ],
)
def test_what_would_fail_or_be_lost_after_the_submission_is_refused(kind, arguments, words):
    with pytest.raises(ConfigError, match=words):
        check_fields(engine(kind, **arguments))


def test_what_schedulers_accept_passes():
    check_fields(slurm(mem="0", gpus_per_node=0, retries=0))
    check_fields(engine("skypilot", cpus=[4, 8.5], memory=16, idle_minutes_to_autostop=-1, gpus=["A100", "H100"]))
    check_fields(engine("docker", num_gpus=-1, launcher=Torchrun(rdzv_port=0)))
    check_fields(engine("docker", additional_kwargs={"device_requests": [], "cap_add": ["IPC_LOCK"]}))
    check_fields(engine("dgxcloud", custom_spec={"compute": {}, "nodePools": ["a"]}))
    check_fields(engine("docker", ulimits=["memlock:-1:-1", "nofile:1024"]))


def test_none_for_a_list_is_none():
    check_fields(executor := engine("lepton", mounts=None, secret_vars=None))
    assert (executor.mounts, executor.secret_vars) == ([], {})


def test_variables_that_dgx_clouds_script_would_change_are_told(capsys):
    warn_of_unused_fields(engine("dgxcloud", env_vars={"A": "a b", "B": "plain", "C": "", "MY_TOKEN": "$canary"}))
    told = capsys.readouterr().err
    assert "env: A='a b' is changed by Bash" in told and "env: MY_TOKEN=*** is changed" in told
    assert "canary" not in told and told.count("\n") == 2


@pytest.mark.parametrize(
    ("executor", "devices", "words"),
    [
        (slurm(gres="gpu:h100:1"), 2, "requests only 1 GPU per node .gres=gpu:h100:1."),
        (slurm(gpus_per_task=1), 2, "gpus_per_task=1 of one torchrun.*or correct gpus_per_task"),
        (slurm(gpus_per_node=4), 8, "Use 2 nodes of 4, or nodes of at most 4 .*or correct gpus_per_node"),
        (engine("lepton", resource_shape="gpu.a10.6xlarge"), 2, "only 1 GPU per node .resource_shape=gpu.a10.6xlarge"),
        (engine("lepton", resource_shape="gpu.4xh100-sxm"), 8, "Use 2 nodes of 4, .* or correct resource_shape"),
        (engine("docker", num_gpus=1), 2, "only 1 GPU per node .num_gpus=1..*Use nodes of at most 1"),
    ],
)
def test_fewer_gpus_than_ranks_are_refused(executor, devices, words):
    with pytest.raises(ConfigError, match=words):
        check_gpus(executor, None, devices=devices, nodes=1)


@pytest.mark.parametrize("gres", ["gpu:2", "gres/gpu:2", "gpu:a:1,gpu:b:1", "nvme:1", "gpu=2"])
def test_gpus_that_suffice_for_the_ranks_are_counted_in_each_form(gres, capsys):
    check_gpus(slurm(gres=gres), None, devices=2, nodes=1)
    check_gpus(slurm(gpus_per_task=1, launcher=None), None, devices=2, nodes=1)
    check_gpus(engine("docker", num_gpus=-1), None, devices=2, nodes=1)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (slurm(gpus_per_node=8), "gpus_per_node=8 requests 8 GPUs per node, of which the run uses 2"),
        (engine("docker", num_gpus=4), "num_gpus=4 requests 4 GPUs"),
        (engine("docker"), "DockerExecutor.num_gpus=None requests no GPU"),
        (engine("lepton", resource_shape="cpu.small"), "LeptonExecutor.resource_shape='cpu.small' requests no GPU"),
        (slurm(gpus_per_node=0), "SlurmExecutor.gpus_per_node=0 requests no GPU"),
        (engine("dgxcloud"), "DGXCloudExecutor.gpus_per_node=0 requests no GPU"),
    ],
)
def test_more_gpus_than_ranks_or_none_are_told(executor, words, capsys):
    check_gpus(executor, Partial(work), devices=2, nodes=1)
    assert f"warning: {words}" in capsys.readouterr().err


def test_a_run_on_cpus_needs_no_gpu(capsys):
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.accelerator = "cpu"
    check_gpus(engine("docker"), recipe, devices=2, nodes=1)
    check_gpus(engine("skypilot", instance_type="p5"), None, devices=2, nodes=1)
    assert not capsys.readouterr().err


def test_a_number_of_gpus_that_becomes_that_of_ranks_is_told(capsys):
    dry(engine("lepton", gpus_per_node=8))
    assert "LeptonExecutor.gpus_per_node=8 becomes 2, the run's ranks" in capsys.readouterr().err


def test_nemo_runs_packager_of_commits_is_refused_without_one_and_tells_what_it_leaves_behind(tmp_path, capsys):
    with pytest.raises(
        ConfigError, match="DockerExecutor.packager=GitArchivePackager: .*is in no git repository with HEAD"
    ):
        dry(engine("docker"))
    commands = "git init -q; touch a; git add a; git -c user.name=n -c user.email=e commit -qm a; touch b c d e"
    subprocess.run(commands, shell=True, check=True, cwd=tmp_path)
    dry(engine("docker"))
    dry(slurm(packager=nemo_run.GitArchivePackager(include_submodules=False)))
    told = capsys.readouterr().err
    for kind in ("Docker", "Slurm"):
        assert (
            f"{kind}Executor.packager=GitArchivePackager ships HEAD without the changes of b, c, d and 1 more" in told
        )


@pytest.mark.parametrize(
    "packager", [nemo_run.Packager(debug=True), nemo_run.Packager(symlink_from_remote_dir="/code")]
)
def test_settings_of_a_packager_without_effect_on_slurm_are_told(packager, capsys):
    dry(slurm(packager=packager))
    assert re.search(r"warning: SlurmExecutor\.packager\.\w+=.* has no effect", capsys.readouterr().err)


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
        (slurm(srun_args="--mpi=pmix"), "SlurmExecutor.srun_args='--mpi=pmix': takes a list"),
        (slurm(gpus_per_node="8"), "gpus_per_node='8': takes a whole number"),
        (slurm(setup_lines=["a"]), "setup_lines=.*takes text"),
        (slurm(additional_parameters=["a"]), "additional_parameters=.*takes a dictionary"),
        (nemo_run.DockerExecutor(container_image="i", volumes="/a:/b"), "DockerExecutor.volumes='/a:/b': takes a list"),
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


def test_a_run_on_this_machine_cant_be_left():
    with pytest.raises(ConfigError, match="detach=True: a run on this machine ends with its command"):
        dry(nemo_run.LocalExecutor(), detach=True)


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
