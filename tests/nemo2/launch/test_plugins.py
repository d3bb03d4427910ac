# SPDX-License-Identifier: Apache-2.0
"""Plugins: what each does to recipe and executor; ranks that are started again for real."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import nemo_run
import pytest
from fiddle._src.experimental import dataclasses as fdl_dc
from lightning.pytorch.callbacks import Timer
from nemo_run.core.execution.launcher import Launcher
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo2 import plugins
from nemo2.base.errors import ConfigError
from nemo2.callbacks import (
    FaultToleranceCallback,
    HangWatchdog,
    MemoryProfileCallback,
    NsysCallback,
    PreemptionCallback,
    PytorchProfilerCallback,
)
from nemo2.config import Config
from nemo2.config.walk import class_of, select
from nemo2.launch import RankFailure, launch, run
from nemo2.launch.plugins.apply import apply_plugins, build_plugins, split_plugins
from nemo2.launch.slurm.script import job_script
from nemo2.launch.slurm.settings import ClusterSettings
from nemo2.launch.slurm.start import job_of
from nemo2.recipes import llama_tiny
from nemo2.recipes.log.default import wandb_logger
from nemo2.training.run_dir.records import read_metrics
from nemo2.training.strategies.distillation import teachers_recipe


@pytest.fixture
def recipe() -> Any:
    return llama_tiny.pretrain_recipe()


def shortened(recipe: Any, *, steps: int, folder: Path) -> Any:
    """The recipe as a run of one rank whose steps take no time worth speaking of; what is run is its start and end."""
    recipe.trainer.max_steps, recipe.trainer.limit_val_batches, recipe.trainer.log_every_n_steps = steps, 0, 1
    recipe.strategy.tensor_model_parallel_size, recipe.strategy.sequence_parallel = 1, False
    recipe.model.config.num_layers, recipe.data.seq_length, recipe.data.max_bytes = 1, 32, 100_000
    recipe.data.global_batch_size, recipe.data.micro_batch_size = 2, 2
    recipe.log.log_dir = str(folder)
    return recipe


def local(**arguments: Any) -> Any:
    return nemo_run.LocalExecutor(launcher="torchrun", ntasks_per_node=2, **arguments)


def slurm(**arguments: Any) -> Any:
    given = {"launcher": "torchrun", "ntasks_per_node": 8, "nodes": 2, "time": "01:00:00", **arguments}
    return nemo_run.SlurmExecutor(account="a", partition="p", **given)


def script_of(executor: Any) -> str:
    return job_script(job_of(executor, ClusterSettings(), name="x", experiment_id="x_1", devices=8, nodes=2))


def test_names_carry_arguments_and_unknown_ones_get_the_nearest() -> None:
    texts = split_plugins(["NsysPlugin(start_step=5, end_step=8, ranks=[0, 1]),TritonCacheSetup", "PreemptionPlugin"])
    assert [type(one).__name__ for one in build_plugins(texts)] == [
        "NsysPlugin",
        "TritonCacheSetup",
        "PreemptionPlugin",
    ]
    assert build_plugins(texts)[0].ranks == [0, 1]
    assert build_plugins(Config(plugins.PreemptionPlugin, preempt_time=90))[0].preempt_time == 90
    for wrong, words in (
        ("NsisPlugin", "NsysPlugin"),
        ("os.system", "os.system"),
        ("NsysPlugin(start=1)", "start_step"),
        (3, "nemo_run.Plugin"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_plugins([wrong])


def test_plugins_come_before_the_checks_and_a_dry_run_tells_what_each_changed(recipe, capsys) -> None:
    class Wrong(nemo_run.Plugin):
        def setup(self, task: Any, executor: Any) -> None:
            task.data.global_batch_size = 7

    with pytest.raises(ConfigError, match="global_batch_size"):
        launch(recipe, "local", plugins=[Wrong()], dryrun=True)
    shapes = []

    class Looks(nemo_run.Plugin):
        def setup(self, task: Any, executor: Any) -> None:
            shapes.append((executor.nnodes(), executor.nproc_per_node(), self.experiment_id.split("_")[0]))
            executor.env_vars["HF_TOKEN"] = "hidden-words"

    launch(recipe, "local", devices=2, plugins=[plugins.TritonCacheSetup(folder="/scratch/t"), Looks()], dryrun=True)
    said = capsys.readouterr().out
    assert "TritonCacheSetup: TRITON_CACHE_DIR=/scratch/t" in said and "  TRITON_CACHE_DIR=/scratch/t" in said
    assert "Looks: HF_TOKEN=***" in said and "hidden-words" not in said
    assert shapes == [(1, 2, "default")]
    assert recipe.data.global_batch_size != 7  # the user's recipe is as it was


def test_without_an_executor_they_are_refused_rather_than_forgotten(recipe) -> None:
    with pytest.raises(ConfigError, match="Pass executor"):
        run(recipe, plugins=[plugins.TritonCacheSetup()])


def test_speed_is_variables_that_the_executor_shows_and_the_users_own_stay(recipe, capsys) -> None:
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    executor = local(env_vars={"NVTE_FWD_LAYERNORM_SM_MARGIN": "8"})
    plugins.PerfEnvPlugin(gpu_sm100_or_newer=True, layernorm_sm_margin=20).setup(recipe, executor)
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert executor.env_vars["NVTE_BWD_LAYERNORM_SM_MARGIN"] == "20"
    assert executor.env_vars["NVTE_FWD_LAYERNORM_SM_MARGIN"] == "8"
    assert "because the executor sets NVTE_FWD_LAYERNORM_SM_MARGIN=8" in capsys.readouterr().err
    executor = local()
    plugins.PerfEnvPlugin(enable_layernorm_sm_margin=False, nccl_pp_comm_chunksize=2**21).setup(recipe, executor)
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert executor.env_vars["NVTE_FWD_LAYERNORM_SM_MARGIN"] == "0"
    assert "NCCL_P2P_NET_CHUNKSIZE" not in executor.env_vars  # one stage
    assert "one pipeline stage" in capsys.readouterr().err
    recipe.trainer.strategy.pipeline_model_parallel_size = 2
    plugins.PerfEnvPlugin(nccl_pp_comm_chunksize=2**21).setup(recipe, executor := local())
    assert executor.env_vars["NCCL_P2P_NET_CHUNKSIZE"] == "2097152"


def test_registered_buffers_take_expandable_segments_away(recipe, capsys) -> None:
    executor = local(env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"})
    plugins.PerfEnvPlugin(user_buffer_registration=True).setup(recipe, executor)
    assert executor.env_vars["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert executor.env_vars["NCCL_NVLS_ENABLE"] == "1"
    assert "is removed from" in capsys.readouterr().err


def test_a_faster_clock_is_a_line_of_a_slurm_job(recipe) -> None:
    plugins.PerfEnvPlugin(enable_vboost=True).setup(recipe, executor := slurm(setup_lines="module load x"))
    lines = script_of(executor).splitlines()
    [vboost] = [place for place, line in enumerate(lines) if "boost-slider --vboost 1" in line]
    assert (
        lines.index("module load x")
        < vboost
        < next(i for i, line in enumerate(lines) if "torch.distributed.run" in line)
    )
    with pytest.raises(ConfigError, match="Slurm"):
        plugins.PerfEnvPlugin(enable_vboost=True).setup(recipe, local())


@pytest.mark.parametrize("starter", ["torchrun", None])
def test_nsys_stands_before_the_ranks_of_a_slurm_job(recipe, starter) -> None:
    executor = slurm(launcher=starter)
    plugins.NsysPlugin(start_step=5, end_step=8, nsys_trace=["cuda", "nvtx", "cublas"]).setup(recipe, executor)
    [callback] = select(recipe.trainer.callbacks, NsysCallback)
    assert (callback.start_step, callback.end_step) == (5, 8)
    script = script_of(executor)
    assert "nsys profile -s none -t cuda,nvtx,cublas" in script and "--capture-range=cudaProfilerApi" in script
    assert script.index("nsys profile") < script.index('"$1" -m torch.distributed.run' if starter else '"$1" $4')
    with pytest.raises(ConfigError, match="trainer.callbacks already contains this callback"):
        plugins.NsysPlugin(start_step=5, end_step=8).setup(recipe, slurm())


def test_nsys_runs_the_ranks_of_this_machine(recipe, tmp_path, warm_interpreter, monkeypatch) -> None:
    tool = tmp_path / "bin" / "nsys"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/bash\necho "$*" >"$(dirname "$0")/asked"\n'
        'while [ "$1" != -o ]; do shift; done; shift 2\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    shortened(recipe, steps=1, folder=tmp_path / "runs")
    result = launch(recipe, "local", devices=1, plugins=[plugins.NsysPlugin(start_step=0, end_step=1)])
    assert result.status == "succeeded"
    asked = (tool.parent / "asked").read_text()
    assert asked.startswith("profile -s none -t nvtx,cuda") and "torchrun" in asked


def test_profilers_are_callbacks_with_the_plugins_arguments(recipe) -> None:
    told = apply_plugins(
        [
            plugins.PytorchProfilerPlugin(start_step=2, end_step=5, warmup_steps=1),
            plugins.MemoryProfilePlugin(dir="/scratch/m", ranks=[0]),
        ],
        recipe,
        local(),
        experiment_id="x",
    )
    [profiler] = select(recipe.trainer.callbacks, PytorchProfilerCallback)
    [memory] = select(recipe.trainer.callbacks, MemoryProfileCallback)
    assert (profiler.start_step, profiler.end_step, profiler.warmup_steps) == (2, 5, 1)
    assert (memory.dir, memory.ranks) == ("/scratch/m", [0])
    assert any(line.startswith("MemoryProfilePlugin: trainer.callbacks[") and "'/scratch/m'" in line for line in told)


def test_a_signal_before_the_end_of_a_jobs_time(recipe) -> None:
    plugins.PreemptionPlugin(preempt_time=240).setup(recipe, executor := slurm())
    assert script_of(executor).count("#SBATCH --signal=TERM@240") == 1
    assert "#SBATCH --signal=" in script_of(slurm()) and not select(recipe.trainer.callbacks, PreemptionCallback)
    plugins.PreemptionPlugin(sig=signal.SIGUSR2).setup(recipe, executor := slurm())
    assert "#SBATCH --signal=USR2@60" in script_of(executor)
    assert select(recipe.trainer.callbacks, PreemptionCallback)[0].sig == "SIGUSR2"


def test_a_callback_without_a_list_stays_beside_those_that_plugins_add(recipe) -> None:
    """Lightning takes a single callback too."""
    recipe.trainer.callbacks = Config(Timer, duration="00:01:00:00")
    assert teachers_recipe(recipe) is None
    plugins.PreemptionPlugin(sig=signal.SIGUSR2).setup(recipe, slurm())
    plugins.PreemptionPlugin(callbacks=[Config(HangWatchdog)]).setup(recipe, slurm())
    assert [class_of(one) for one in recipe.trainer.callbacks] == [Timer, PreemptionCallback, HangWatchdog]


def test_fault_tolerance_is_torchruns_restarts_and_a_watchdog(recipe) -> None:
    plugin = plugins.FaultTolerancePlugin(rank_heartbeat_timeout=30, resiliency_ext=False, num_job_retries_on_failure=1)
    plugin.setup(recipe, executor := slurm(launcher=None))
    [watchdog] = select(recipe.trainer.callbacks, HangWatchdog)
    assert (watchdog.timeout_seconds, watchdog.first_timeout_seconds) == (30.0, 1800.0)
    script = script_of(executor)
    assert "export PET_MAX_RESTARTS=3" in script and '--max-restarts "${PET_MAX_RESTARTS:-0}"' in script
    assert "--retries 1 " in script and "--retries" not in script_of(slurm())
    never = plugins.FaultTolerancePlugin(resiliency_ext=False, num_job_retries_on_failure=0)
    never.setup(llama_tiny.pretrain_recipe(), executor := slurm())
    assert "--retries 0 " in script_of(executor.clone())
    with pytest.raises(ConfigError, match="requires torchrun"):
        plugin.setup(llama_tiny.pretrain_recipe(), slurm(launcher=Launcher()))
    with pytest.raises(ConfigError, match="nsys"):
        plugins.NsysPlugin(start_step=1, end_step=2).setup(fresh := llama_tiny.pretrain_recipe(), executor := slurm())
        plugin.setup(fresh, executor)


def test_the_resiliency_extension_takes_torchruns_place(recipe, monkeypatch) -> None:
    monkeypatch.setattr("nemo2.launch.plugins.survival.has", lambda package: True)
    plugins.FaultTolerancePlugin(resiliency_ext=True, rank_heartbeat_timeout=45).setup(recipe, executor := slurm())
    assert select(recipe.trainer.callbacks, FaultToleranceCallback)
    script = script_of(executor)
    assert "-m nvidia_resiliency_ext.fault_tolerance.launcher" in script and "torch.distributed.run" not in script
    assert "--ft-rank-heartbeat-timeout 45 " in script and "--ft-initial-rank-heartbeat-timeout 1800 " in script
    with pytest.raises(ConfigError, match="NVML"):
        plugins.FaultTolerancePlugin(resiliency_ext=True).setup(llama_tiny.pretrain_recipe(), local())
    monkeypatch.setattr("nemo2.launch.plugins.survival.has", lambda package: False)
    with pytest.raises(ConfigError, match="not installed here"):
        plugins.FaultTolerancePlugin(resiliency_ext=True).setup(llama_tiny.pretrain_recipe(), slurm())


DEADLY = """
import os, signal, time
from pathlib import Path
import lightning.pytorch as pl
from nemo2.config.capture import configurable
from nemo2.base.errors import ConfigError


@configurable
class Deadly(pl.Callback):
    def __init__(self, folder: str, how: str) -> None:
        self.folder, self.how = Path(folder), how

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step != 2:
            return
        with open(self.folder / "met", "a") as file:
            file.write("x")
        if self.how == "setting":
            raise ConfigError("it is set wrong")
        if (self.folder / "met").read_text() == "x":
            time.sleep(600) if self.how == "hangs" else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def deadly(tmp_path, monkeypatch, warm_interpreter):
    """A callback that the ranks can import, and a home for nemo-run."""
    (tmp_path / "deadly_callback.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))
    import deadly_callback  # pyright: ignore[reportMissingImports]

    def recipe(how: str) -> Any:
        made = shortened(llama_tiny.pretrain_recipe(), steps=3, folder=tmp_path / "runs")
        made.trainer.strategy.progress_interval = 1
        made.log.ckpt.every_n_train_steps = 1
        made.trainer.callbacks = [Config(deadly_callback.Deadly, folder=str(tmp_path), how=how)]
        return made

    yield recipe
    sys.modules.pop("deadly_callback", None)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_ranks_are_started_again_within_the_job_and_go_on(deadly, tmp_path, how) -> None:
    plugin = plugins.FaultTolerancePlugin(
        num_in_job_restarts=1, rank_heartbeat_timeout=5 if how == "hangs" else 120, initial_rank_heartbeat_timeout=200
    )
    result = launch(deadly(how), "local", devices=1, plugins=[plugin])
    assert result.status == "succeeded" and (tmp_path / "met").read_text() == "xx"
    assert [one["step"] for one in read_metrics(result.run_dir) if "reduced_train_loss" in one] == [0, 1, 2]


@pytest.mark.resiliency
def test_the_resiliency_extensions_launcher_hears_the_ranks(deadly, tmp_path) -> None:
    """It looks at GPUs before it starts ranks again, so that on CPUs only its watching can be shown."""
    recipe = deadly("not at all")
    recipe.trainer.max_steps = 2
    recipe.trainer.callbacks = [Config(FaultToleranceCallback)]
    result = launch(recipe, nemo_run.LocalExecutor(launcher="ft"), devices=1)
    assert result.status == "succeeded"
    said = "".join(path.read_text(errors="replace") for path in Path(result.log_dir).rglob("combined.log"))
    assert "no process watches" not in said


def test_a_wrong_setting_is_not_tried_again(deadly, tmp_path) -> None:
    plugin = plugins.FaultTolerancePlugin(resiliency_ext=False, num_in_job_restarts=1)
    with pytest.raises(RankFailure, match="it is set wrong"):
        launch(deadly("setting"), "local", devices=1, plugins=[plugin])
    assert (tmp_path / "met").read_text() == "x"


def test_validation_tells_everything_at_once(recipe) -> None:
    recipe.resume.resume_if_exists = False
    recipe.trainer.num_nodes = 4
    with pytest.raises(ConfigError) as told:
        plugins.ConfigValidationPlugin().setup(recipe, slurm())
    assert "resume_if_exists" in str(told.value) and "trainer.num_nodes=4, but the executor starts 2 nodes" in str(
        told.value
    )
    recipe.resume.resume_if_exists, recipe.trainer.num_nodes, recipe.trainer.devices = True, 2, 8
    plugins.ConfigValidationPlugin().setup(recipe, slurm())
    recipe.log.log_dir = "/elsewhere/runs"
    docker = nemo_run.DockerExecutor(container_image="x", volumes=["/data:/data"], ntasks_per_node=8)
    recipe.trainer.num_nodes = 1
    with pytest.raises(ConfigError, match="not inside a mount"):
        plugins.ConfigValidationPlugin().setup(recipe, docker)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Lepton", {"nemo_run_dir": "/p", "mounts": [{"path": "/x", "mount_path": "/data"}]}),
        ("Docker", {"volumes": ["/x:/data:rw"]}),
        ("Docker", {"volumes": ["/data"]}),
    ],
)
def test_a_run_directory_on_a_volume_of_each_engine_is_valid(recipe, kind, fields) -> None:
    executor = getattr(nemo_run, f"{kind}Executor")(container_image="i", **fields)
    recipe.log.log_dir = "/data/runs"
    plugin = plugins.ConfigValidationPlugin(validate_nodes_and_devices=False)
    plugin.setup(recipe, executor)
    recipe.log.log_dir = "/database"
    with pytest.raises(ConfigError, match="not inside a mount of the container .mounts: /data"):
        plugin.setup(recipe, executor)


def test_an_argument_that_only_slurm_reads_is_told_elsewhere(recipe, capsys) -> None:
    docker = nemo_run.DockerExecutor(container_image="x", launcher="torchrun")
    plugins.FaultTolerancePlugin(num_job_retries_on_failure=5, resiliency_ext=False).setup(recipe, docker)
    plugins.PreemptionPlugin(preempt_time=90).setup(recipe, docker)
    told = capsys.readouterr().err
    assert "FaultTolerancePlugin.num_job_retries_on_failure=5 has no effect on a DockerExecutor" in told
    assert "PreemptionPlugin.preempt_time=90 has no effect on a DockerExecutor" in told
    assert docker.retries == 0, "Docker refuses to start such a container"
    plugins.PreemptionPlugin().setup(recipe, docker)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (
            lambda: plugins.NsysPlugin(start_step=1, end_step=2, nsys_trace="cuda"),
            "NsysPlugin.nsys_trace='cuda': takes a list",
        ),
        (lambda: plugins.PerfEnvPlugin(enable_vboost="no"), "PerfEnvPlugin.enable_vboost='no': takes True or False"),
        (lambda: plugins.FaultTolerancePlugin(resiliency_ext="yes"), "resiliency_ext='yes': takes True or False"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(plugin, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build_plugins(plugin())


def test_wandb_is_set_where_its_key_is(recipe, monkeypatch, capsys) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    plugin = plugins.WandbPlugin(name="one", logger_fn=lambda name: wandb_logger(project="p", name=name))
    plugin.setup(recipe, executor := local())
    assert recipe.log.wandb is None and "WANDB_API_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_API_KEY", "secret-words")
    plugin.setup(recipe, executor)
    assert (
        recipe.log.wandb.name == "one" and recipe.log.wandb.config["trainer"]["max_steps"] == recipe.trainer.max_steps
    )
    assert executor.env_vars["WANDB_API_KEY"] == "secret-words"


def test_a_logger_with_arguments_bound_can_be_written_with_its_experiment(recipe, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "dummy")
    plugin = plugins.WandbPlugin(name="one", logger_fn=partial(wandb_logger, project="p"))
    assert ZlibJSONSerializer().serialize(fdl_dc.convert_dataclasses_to_configs(plugin, allow_post_init=True))
    plugin.setup(recipe, nemo_run.LocalExecutor())
    assert (recipe.log.wandb.project, recipe.log.wandb.name) == ("p", "one")
