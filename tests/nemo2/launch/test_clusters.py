# SPDX-License-Identifier: Apache-2.0
"""Profiles of clusters: what they make, what is refused, and the shape on each kind of executor."""

import json
import stat

import nemo_run
import pytest

from nemo2.cli.app import main
from nemo2.errors import ConfigError
from nemo2.launch import launch
from nemo2.launch.announce import print_start
from nemo2.launch.clusters import KINDS, profiles, resolve_executor, user_file
from nemo2.launch.launcher import place_of
from nemo2.launch.shape import give_shape
from nemo2.launch.slurm.probing import Finding

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
    ("text", "words"),
    [
        ("[clusters.mine]\npartition = 'x'", "mine. has no kind; known names: local, slurm"),
        ("[clusters.mine]\nkind = 'slrum'", "mine. kind='slrum'; did you mean 'slurm'"),
        (
            "[clusters.mine]\nkind = 'slurm'\npartiton = 'x'",
            "'partiton' is not a field of kind 'slurm'; did you mean 'partition'",
        ),
        ("[clusters.mine]\nkind = 'slurm'\nstarter = 'mpirun'", "starter='mpirun': must be 'torchrun' or 'srun'"),
        ("[clusters.mine]\nkind = 'slurm'\nnodes = 4", "'nodes' is not a field"),
        ("[clusters.mine]\nkind = 'slurm'\ntime = '4 hours'", "time='4 hours'"),
        ("[clusters.mine]\nkind = 'slurm'\ncode = 'all'", "code='all': must be one of"),
        ("[clusters.mine]\nkind = 'slurm'\nssh = {host='h', user='u'}", "job_dir is missing"),
        ("[clusters.mine]\nkind = 'slurm'\nssh = 'h'", "must be a table with host and user"),
        ("[clusters.mine]\nkind = 'dgxcloud'", "DGXCloudExecutor refuses it: .*base_url"),
        ("[clusters]\nmine = 3", "must be a table"),
        ("clusters = 3", "must be tables"),
        ("[clusters.mine]\nkind = ['slurm']", "kind=.*did you mean 'slurm'"),
        ("[clusters.mine]\nkind = 'slurm'\nenv = 'A=b'", "env='A=b': must be a table"),
        ("[clusters.'a b']\nkind = 'local'", "is not a valid directory name"),
        ("[clusters", "can't be read"),
    ],
)
def test_a_wrong_profile_is_told_with_file_field_and_fix(text, words):
    write(text)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_executor("mine")
    assert "clusters.toml" in str(caught.value)


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
        return nemo_run.LeptonExecutor(container_image="i", nemo_run_dir="/p")
    return getattr(nemo_run, KINDS[kind])(
        **{"docker": {"container_image": "i"}, "slurm": {"account": "a"}}.get(kind, {})
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "docker" and not kind.startswith("skypilot")])
@pytest.mark.parametrize("with_gpus", [False, True])
def test_the_shape_arrives_on_every_kind(kind, with_gpus, kubernetes):
    executor = made(kind)
    if with_gpus and hasattr(executor, "gpus_per_node"):
        executor.gpus_per_node = 8
    give_shape(executor, devices=2, nodes=2)
    assert (executor.nnodes(), executor.nproc_per_node()) == (2, 2)


@pytest.mark.parametrize("fields", [{"gpus_per_node": 8}, {"gpus_per_task": 2}, {"launcher": None}])
def test_gpus_of_a_slurm_job_are_not_its_ranks(fields):
    executor = nemo_run.SlurmExecutor(account="a", **fields)
    give_shape(executor, devices=1, nodes=3)
    assert (executor.nnodes(), executor.nproc_per_node()) == (3, 1)


def test_a_kind_that_cant_carry_the_shape_is_refused():
    give_shape(made("docker"), devices=2, nodes=1)
    with pytest.raises(
        ConfigError, match="DockerExecutor would start 1 nodes of 2 ranks, but the run has 2 nodes of 2.*one machine"
    ):
        give_shape(made("docker"), devices=2, nodes=2)

    class KubeRayExecutor:
        pass

    with pytest.raises(ConfigError, match="Ray clusters, not ranks"):
        give_shape(KubeRayExecutor(), devices=2, nodes=2)


def test_the_commands_write_list_and_show_profiles(capsys):
    command = ["cluster", "add", "new", "kind=slurm", "partition=batch", "gpus_per_node=8", "env.A=a b", 'time="30"']
    command += ["env.MY_TOKEN=canary"]
    assert main(command) == 0
    assert stat.S_IMODE(user_file().stat().st_mode) == 0o600
    executor, _ = resolve_executor("new")
    assert (executor.gpus_per_node, executor.env_vars, executor.time) == (8, {"A": "a b", "MY_TOKEN": "canary"}, "30")
    assert main(command) == 2 and "already exists in" in capsys.readouterr().err
    assert main(["cluster", "list"]) == 0 and "new" in capsys.readouterr().out
    assert main(["cluster", "show", "new"]) == 0
    shown = capsys.readouterr().out
    assert 'partition = "batch"' in shown and '"A" = "a b"' in shown and "canary" not in shown
    assert main(["cluster", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "new", "kind": "slurm", "file": str(user_file())}]
    assert main(["cluster", "show", "new", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["values"]["env"] == {"A": "a b", "MY_TOKEN": "***"} and told["executor"] == "nemo_run.SlurmExecutor"
    assert main(["cluster", "add", "bad", "kind=slurm", "partiton=x"]) == 2
    assert "did you mean 'partition'" in capsys.readouterr().err and sorted(profiles()) == ["new"]
    assert main(["cluster", "test", "nwe"]) == 2 and "did you mean 'new'" in capsys.readouterr().err


def test_what_is_added_is_read_back_or_refused_and_the_other_profiles_stay(capsys):
    assert main(["cluster", "add", "good", "kind=slurm", "env.A=\U0001f600", "env.B=1\nC = 2"]) == 0
    assert resolve_executor("good")[0].env_vars == {"A": "\U0001f600", "B": "1\nC = 2"}
    for setting in (".a=1", "env..A=1", "env.=1", "kind.a=1", "env.A=[inf]"):
        assert main(["cluster", "add", "bad", "kind=slurm", setting]) == 2
        assert "Traceback" not in capsys.readouterr().err and sorted(profiles()) == ["good"]


@pytest.mark.parametrize("stops", [False, True])
def test_a_test_of_a_cluster_is_told_as_json_too(monkeypatch, capsys, stops):
    write(SLURM)
    finding = Finding("clocks differ by 9 s", stops=stops)
    monkeypatch.setattr("nemo2.launch.slurm.probing.test_cluster", lambda *_, **__: iter([finding]))
    assert main(["cluster", "test", "mine", "--nodes", "3", "--json"]) == int(stops)
    told = {"name": "mine", "nodes": 3, "works": not stops, "findings": [{"message": finding.message, "stops": stops}]}
    assert json.loads(capsys.readouterr().out) == told
    assert main(["cluster", "test", "mine"]) == int(stops)
    assert capsys.readouterr().out.startswith("error: clocks" if stops else "note: clocks")


@pytest.mark.parametrize(("typed", "limit"), [("30", "30"), ("04:00:00", "04:00:00"), ("1-00:00:00", "1-00:00:00")])
def test_a_time_limit_is_text_however_toml_reads_it(capsys, typed, limit):
    assert main(["cluster", "add", "typed", "kind=slurm", f"time={typed}"]) == 0
    if "-" not in typed:
        write(f"{user_file().read_text()}[clusters.written]\nkind = 'slurm'\ntime = {typed}\n")
    for name in profiles():
        executor, _ = resolve_executor(name)
        assert executor.time == limit
        assert main(["cluster", "show", name]) == 0 and "time = " in capsys.readouterr().out


def dry_run_on_nodes_of_four(capsys, *options, devices="auto"):
    """The output of a dry run of llama_tiny on a cluster whose nodes have 4 GPUs."""
    assert main(["cluster", "add", "four", "kind=slurm", "gpus_per_node=4", "job_dir=/shared/jobs", "gpu=GB200"]) == 0
    batch = "data.global_batch_size=512"
    code = main(
        ["pretrain", "llama_tiny", f"trainer.devices={devices}", batch, "--executor", "four", "--dryrun", *options]
    )
    captured = capsys.readouterr()
    return f"exit {code}\n{captured.out}{captured.err}"


@pytest.mark.parametrize(
    ("options", "gpus", "script"),
    [((), "4 GPUs, four", '"$_python" 1 4 '), (("--gpus", "16"), "16 GPUs on 4 nodes, four", '"$_python" 4 4 ')],
    ids=["profile", "gpus"],
)
def test_what_starts_is_told_with_the_nodes_that_the_profile_has(capsys, options, gpus, script):
    said = dry_run_on_nodes_of_four(capsys, *options)
    assert "exit 0" in said and gpus in said and script in said


@pytest.mark.parametrize(
    ("devices", "fix"), [("8", "Use 2 nodes of 4, or nodes of at most 4"), ("6", "Use nodes of at most 4")]
)
def test_more_ranks_than_the_profiles_nodes_have_gpus_are_refused(capsys, devices, fix):
    said = dry_run_on_nodes_of_four(capsys, devices=devices)
    assert "exit 2" in said and f"trainer.devices={devices}: the executor requests only 4 GPUs per node" in said
    assert fix in said


@pytest.mark.parametrize(("gpus", "code"), [("A100x16", 2), ("GB200x16", 0), ("16", 0)])
def test_gpus_other_than_the_profiles_are_refused(capsys, gpus, code):
    said = dry_run_on_nodes_of_four(capsys, "--gpus", gpus)
    assert f"exit {code}" in said
    assert ("--gpus A100: the nodes of 'four' have GB200 GPUs (gpu in its profile)" in said) == bool(code)


def test_what_starts_is_told_with_the_profiles_gpus_and_its_place_for_runs(capsys):
    from nemo2.recipes import llama3_8b

    assert main(["cluster", "add", "new", "kind=slurm", "gpu=H100", "runs=/shared/runs"]) == 0
    recipe = llama3_8b.pretrain_recipe(num_nodes=2)
    _, settings, machine = place_of("new", None)
    print_start(recipe, "llama3_8b", "new", machine, settings)
    recipe.log.log_dir = "mine"
    print_start(recipe, "llama3_8b", "new", machine, settings)
    said = capsys.readouterr().err
    assert "16 GPUs on 2 nodes, new (H100" in said
    assert "/shared/runs/default" in said and "/shared/runs/mine/default" in said


def test_a_launch_from_python_says_what_starts_as_a_command_does_and_a_dry_run_shows_no_variables_of_ours(capsys):
    from nemo2.recipes import llama_tiny

    recipe = llama_tiny.pretrain_recipe()
    launch(recipe, devices=2, name="mine", dryrun=True)
    told = capsys.readouterr()
    assert told.err.startswith("mine\n") and "parameters  3.67M" in told.err
    assert "torchrun" in told.out and "PYTHONSAFEPATH" in told.out and "NEMO2_" not in told.out
    launch(recipe, devices=2, name="mine", dryrun=True, quiet=True)
    assert "parameters" not in capsys.readouterr().err
