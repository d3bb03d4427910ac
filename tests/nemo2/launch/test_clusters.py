# SPDX-License-Identifier: Apache-2.0
"""Profiles of clusters: what they make, what is refused, and the shape on each kind of executor."""

import re
import stat
from pathlib import Path

import nemo_run
import pytest

from nemo2.base.errors import ConfigError
from nemo2.launch import launch
from nemo2.launch.announce import print_start
from nemo2.launch.clusters import KINDS, profiles, resolve_executor, user_file
from nemo2.launch.executor_ranks import set_ranks
from nemo2.launch.launcher import place_of
from nemo2.launch.slurm.probing import Finding
from nemo2.recipes import llama3_8b, llama_tiny

SLURM = """
[clusters.mine]
kind = "slurm"
account = "research"
partition = "batch"
gpus_per_node = 8
starter = "srun"
python = "/opt/python"
grace_seconds = 30
env = { NCCL_DEBUG = "WARN", N = 3 }
ssh = { host = "login", user = "me", port = 2222, identity = "~/.ssh/id" }
job_dir = "/shared/jobs"
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "nemo_run"))
    (tmp_path / "project" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "inside")
    return tmp_path


def write(text, *, project=False):
    file = user_file() if not project else user_file().parents[2] / "project" / "nemo2.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_profile_of_slurm_makes_nemo_runs_executor_and_what_is_ours():
    write(SLURM)
    executor, settings = resolve_executor("mine")
    assert isinstance(executor, nemo_run.SlurmExecutor) and settings is not None
    assert (executor.account, executor.partition, executor.gpus_per_node, executor.launcher) == (
        "research",
        "batch",
        8,
        None,
    )
    assert executor.time == "", "not nemo-run's ten minutes"
    assert executor.env_vars == {"NCCL_DEBUG": "WARN", "N": "3"}
    tunnel = executor.tunnel
    assert isinstance(tunnel, nemo_run.SSHTunnel)
    assert (tunnel.host, tunnel.port, tunnel.job_dir) == ("login", 2222, "/shared/jobs")
    assert str(tunnel.identity).startswith("/")
    assert (settings.python, settings.grace_seconds, settings.code) == ("/opt/python", 30, "tree")


def test_a_projects_profile_wins_over_the_users():
    write(SLURM)
    write('[clusters.mine]\nkind = "local"\n[clusters.other]\nkind = "docker"\ncontainer_image = "i"\n', project=True)
    assert isinstance(resolve_executor("mine")[0], nemo_run.LocalExecutor)
    assert sorted(profiles()) == ["mine", "other"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("partition = 'x'", "mine. has no kind; known names: local, slurm"),
        ("kind = 'slrum'", "mine. kind='slrum'; did you mean 'slurm'"),
        ("kind = ['slurm']", "kind=.*did you mean 'slurm'"),
        ("kind = 'slurm'\npartiton = 'x'", "'partiton' is not a field of kind 'slurm'; did you mean 'partition'"),
        ("kind = 'slurm'\nstarter = 'mpirun'", "starter='mpirun': must be 'torchrun' or 'srun'"),
        ("kind = 'slurm'\nnodes = 4", "'nodes' is not a field"),
        ("kind = 'slurm'\ntime = '4 hours'", "time='4 hours'"),
        ("kind = 'slurm'\ncode = 'all'", "code='all': must be one of"),
        ("kind = 'slurm'\nssh = {host='h', user='u'}", "job_dir is missing"),
        ("kind = 'slurm'\njob_dir = 'jobs'", "mine. job_dir='jobs': must be an absolute path"),
        ("kind = 'slurm'\nssh = 'h'", "must be a table with host and user"),
        ("kind = 'slurm'\nenv = 'A=b'", "env='A=b': must be a table"),
        ("kind = 'slurm'\npython = '~/venv/bin/python'", "python='~/venv/bin/python': must be an absolute path"),
        ("kind = 'slurm'\nruns = '~/runs'", "runs='~/runs': must be an absolute path"),
        ("kind = 'slurm'\nrequeue = 'false'", "requeue='false': takes True or False"),
        ("kind = 'slurm'\ngrace_seconds = 1.5", "grace_seconds=1.5"),
        ("kind = 'slurm'\ngpu = 8", "gpu=8: takes text"),
        ("kind = 'slurm'\nsrun_args = '--mpi=pmix'", "srun_args='--mpi=pmix': takes a list"),
        ("kind = 'slurm'\nenv = { A = true }", "env: A=True: must be text or a number"),
        ("kind = 'slurm'\nenv = { 'A B' = 'x' }", "env: 'A B' is not a valid variable name"),
        ("kind = 'local'\nssh = {host='h', user='u'}", "'ssh' is not a field of kind 'local'"),
        ("kind = 'docker'\ncontainer_image = 'i'\njob_dir = '/jobs'", "'job_dir' is not a field of kind 'docker'"),
        ("kind = 'dgxcloud'", "DGXCloudExecutor refuses it: .*base_url"),
        ("kind = 'local'\n[clusters.'a b']\nkind = 'local'", "is not a valid directory name"),
        ("kind = 'local'\n[clusters", "can't be read"),
    ],
)
def test_a_wrong_profile_is_told_with_file_field_and_fix(fields, words):
    write(f"[clusters.mine]\n{fields}")
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_executor("mine")
    assert "clusters.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clusters]\nmine = 3", "must be a table"),
        ("clusters = 3", "must be tables"),
        (f"{SLURM}[[mine.env_list]]\nname = 'A'", r"'mine' belongs to no profile.*\[clusters.mine\]"),
    ],
)
def test_what_is_no_table_of_profiles_is_told(text, words):
    write(text)
    with pytest.raises(ConfigError, match=rf"clusters\.toml.*{words}"):
        resolve_executor("mine")


def test_the_pages_profiles_are_read_whole():
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text("utf-8")
    for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
        write(text)
        [(name, profile)] = profiles().items()
        assert profile.values["kind"] in KINDS
    assert name == "k8s" and profile.values["env_list"][0]["name"] == "HF_TOKEN"  # of the page's last


def test_an_unknown_name_gets_the_nearest_and_executors_in_python_stay_possible(home):
    write(SLURM)
    (home / "nemo_run").mkdir()
    (home / "nemo_run" / "executors.py").write_text(
        "import nemo_run\ndef four():\n    return nemo_run.LocalExecutor(ntasks_per_node=4)\n"
    )
    assert resolve_executor("four")[0].nproc_per_node() == 4
    with pytest.raises(ConfigError, match="'mien'.*did you mean 'mine'"):
        resolve_executor("mien")
    with pytest.raises(ConfigError, match="did you mean 'four'"):
        resolve_executor("fuor")
    own = nemo_run.LocalExecutor()
    assert (
        resolve_executor(own) == (own, None)
        and resolve_executor("local") == ("local", None)
        and resolve_executor(None) == (None, None)
    )


@pytest.fixture
def kubernetes(monkeypatch):
    """Kubeflow's executor wants the package and a cluster when it is made."""
    from nemo_run.core.execution import kubeflow

    monkeypatch.setattr(kubeflow, "_KUBERNETES_AVAILABLE", True)
    monkeypatch.setattr(kubeflow.KubeflowExecutor, "_load_kube_clients", lambda self: None)


def made(kind):
    if kind == "kubeflow":
        return nemo_run.KubeflowExecutor(image="i", gpus_per_node=8)
    if kind in ("skypilot", "skypilot_jobs"):
        pytest.importorskip("sky", reason="SkyPilot is not installed: its executors can't be made")
        return getattr(nemo_run, KINDS[kind])(container_image="i", gpus="H100")
    if kind == "dgxcloud":
        names = ("base_url", "kube_apiserver_url", "client_id", "client_secret", "project_name")
        return nemo_run.DGXCloudExecutor(**dict.fromkeys(names, "x"), container_image="i", pvc_nemo_run_dir="/p")
    if kind == "lepton":
        return nemo_run.LeptonExecutor(
            container_image="i", nemo_run_dir="/p", node_group="g", resource_shape="gpu.8xh100-sxm"
        )
    return getattr(nemo_run, KINDS[kind])(
        **{"docker": {"container_image": "i"}, "slurm": {"account": "a"}}.get(kind, {})
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "docker" and not kind.startswith("skypilot")])
@pytest.mark.parametrize("with_gpus", [False, True])
def test_the_shape_arrives_on_every_kind(kind, with_gpus, kubernetes):
    executor = made(kind)
    if with_gpus and hasattr(executor, "gpus_per_node"):
        executor.gpus_per_node = 8
    set_ranks(executor, devices=2, nodes=2)
    assert (executor.nnodes(), executor.nproc_per_node()) == (2, 2)


@pytest.mark.parametrize("fields", [{"gpus_per_node": 8}, {"gpus_per_task": 2}, {"launcher": None}])
def test_gpus_of_a_slurm_job_are_not_its_ranks(fields):
    executor = nemo_run.SlurmExecutor(account="a", **fields)
    set_ranks(executor, devices=1, nodes=3)
    assert (executor.nnodes(), executor.nproc_per_node()) == (3, 1)


def test_a_kind_that_cant_carry_the_shape_is_refused():
    set_ranks(made("docker"), devices=2, nodes=1)
    with pytest.raises(
        ConfigError, match="DockerExecutor would start 1 nodes of 2 ranks, but the run has 2 nodes of 2.*one machine"
    ):
        set_ranks(made("docker"), devices=2, nodes=2)

    class KubeRayExecutor:
        pass

    with pytest.raises(ConfigError, match="Ray clusters, not ranks"):
        set_ranks(KubeRayExecutor(), devices=2, nodes=2)


def test_the_commands_write_list_and_show_profiles(command):
    words = ["kind=slurm", "partition=batch", "gpus_per_node=8", "env.A=a b", 'time="30"', "env.MY_TOKEN=canary"]
    command("cluster add new", *words)
    assert stat.S_IMODE(user_file().stat().st_mode) == 0o600
    executor, _ = resolve_executor("new")
    assert (executor.gpus_per_node, executor.env_vars, executor.time) == (8, {"A": "a b", "MY_TOKEN": "canary"}, "30")
    assert "already exists in" in command("cluster add new", *words, code=2).err
    assert "new" in command("cluster list").out
    shown = command("cluster show new").out
    assert 'partition = "batch"' in shown and '"A" = "a b"' in shown and "canary" not in shown
    assert command("cluster list --json").json == [{"name": "new", "kind": "slurm", "file": str(user_file())}]
    told = command("cluster show new --json").json
    assert told["values"]["env"] == {"A": "a b", "MY_TOKEN": "***"} and told["executor"] == "nemo_run.SlurmExecutor"
    assert "did you mean 'partition'" in command("cluster add bad kind=slurm partiton=x", code=2).err
    assert [*profiles()] == ["new"]
    assert "did you mean 'new'" in command("cluster test nwe", code=2).err


def test_what_is_added_is_read_back_or_refused_and_the_other_profiles_stay(command):
    command("cluster add good kind=slurm", "env.A=\U0001f600", "env.B=1\nC = 2")
    assert resolve_executor("good")[0].env_vars == {"A": "\U0001f600", "B": "1\nC = 2"}
    assert "[clusters.local] is never read" in command("cluster add local kind=slurm", code=2).err
    for setting in (".a=1", "env..A=1", "env.=1", "kind.a=1", "env.A=[inf]"):
        assert "Traceback" not in command("cluster add bad kind=slurm", setting, code=2).err
        assert [*profiles()] == ["good"]


@pytest.mark.parametrize("stops", [False, True])
def test_a_test_of_a_cluster_is_told_as_json_too(monkeypatch, stops, command):
    write(SLURM)
    finding = Finding("clocks differ by 9 s", stops=stops)
    monkeypatch.setattr("nemo2.launch.slurm.probing.test_cluster", lambda *_, **__: iter([finding]))
    told = {"name": "mine", "nodes": 3, "works": not stops, "findings": [{"message": finding.message, "stops": stops}]}
    assert command("cluster test mine --nodes 3 --json", code=int(stops)).json == told
    assert command("cluster test mine", code=int(stops)).out.startswith("error: clocks" if stops else "note: clocks")


@pytest.mark.parametrize(("typed", "limit"), [("30", "30"), ("04:00:00", "04:00:00"), ("1-00:00:00", "1-00:00:00")])
def test_a_time_limit_is_text_however_toml_reads_it(command, typed, limit):
    command("cluster add typed kind=slurm", f"time={typed}")
    if "-" not in typed:
        write(f"{user_file().read_text()}[clusters.written]\nkind = 'slurm'\ntime = {typed}\n")
    for name in profiles():
        executor, _ = resolve_executor(name)
        assert executor.time == limit
        assert "time = " in command("cluster show", name).out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("trainer.devices=auto", 0, ["4 GPUs, four", '"$_python" 1 4 ']),
        ("trainer.devices=auto --gpus 16", 0, ["16 GPUs on 4 nodes, four", '"$_python" 4 4 ']),
        ("trainer.devices=auto --gpus GB200x16", 0, ["16 GPUs on 4 nodes, four"]),
        ("trainer.devices=auto --gpus A100x16", 2, ["--gpus A100: the nodes of 'four' have GB200 GPUs (gpu in its profile)"]),
        ("trainer.devices=8", 2, ["trainer.devices=8: the executor requests only 4 GPUs per node",
                                  "Use 2 nodes of 4, or nodes of at most 4"]),
        ("trainer.devices=6", 2, ["trainer.devices=6: the executor requests only 4 GPUs per node",
                                  "Use nodes of at most 4"]),
    ],
)  # fmt: skip
def test_a_run_starts_on_the_nodes_that_the_profile_has_or_is_refused(command, options, code, words):
    command("cluster add four kind=slurm gpus_per_node=4 job_dir=/shared/jobs gpu=GB200")
    line = "pretrain llama_tiny data.global_batch_size=512 --executor four --dryrun"
    told = "\n".join(command(f"{line} {options}", code=code))
    assert all(word in told for word in words), told


def test_what_starts_is_told_with_the_profiles_gpus_and_its_place_for_runs(capsys, command):
    command("cluster add new kind=slurm gpu=H100 runs=/shared/runs")
    recipe = llama3_8b.pretrain_recipe(num_nodes=2)
    _, settings, machine = place_of("new", None)
    print_start(recipe, "llama3_8b", "new", machine, settings)
    recipe.log.log_dir = "mine"
    print_start(recipe, "llama3_8b", "new", machine, settings)
    said = capsys.readouterr().err
    assert "16 GPUs on 2 nodes, new (H100" in said
    assert "/shared/runs/default" in said and "/shared/runs/mine/default" in said


def test_a_launch_from_python_says_what_starts_as_a_command_does_and_a_dry_run_shows_no_variables_of_ours(capsys):
    recipe = llama_tiny.pretrain_recipe()
    launch(recipe, devices=2, name="mine", dryrun=True)
    told = capsys.readouterr()
    assert told.err.startswith("mine\n") and "parameters  3.67M" in told.err
    assert "torchrun" in told.out and "PYTHONSAFEPATH" in told.out and "NEMO2_" not in told.out
    launch(recipe, devices=2, name="mine", dryrun=True, quiet=True)
    assert "parameters" not in capsys.readouterr().err
