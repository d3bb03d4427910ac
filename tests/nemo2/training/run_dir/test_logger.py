# SPDX-License-Identifier: Apache-2.0
"""`NeMoLogger`: one directory per run that all ranks agree on, and everything that belongs into it."""

import errno
import json
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from nemo2.base.errors import ConfigError
from nemo2.preflight.checks.earlier import directory_to_continue
from nemo2.training.run_dir.directory import (
    NAMED_VERSION_VARIABLE,
    RUN_DIR_FILE_VARIABLE,
    VERSION_VARIABLE,
    choose_directory,
    create_directory,
    delete_leftovers,
    meeting_of,
)
from nemo2.training.run_dir.effective import effective_config
from nemo2.training.run_dir.faults import FAULT_DIR_VARIABLE, read_faults
from nemo2.training.run_dir.log_files import add_log_file
from nemo2.training.run_dir.logger import NeMoLogger
from nemo2.training.run_dir.records import RECIPE_VARIABLE, read_metrics, series
from nemo2.training.run_dir.resumed import ResumedRecipe
from support.one_weight import OneWeight, quiet_trainer
from support.saved_checkpoints import saved


class Model(OneWeight):
    def __init__(self, fail_at=None):
        super().__init__()
        self.fail_at = fail_at

    def training_step(self, batch, batch_index):
        if self.trainer.global_step == self.fail_at:
            raise ValueError("the disk is full")
        logging.getLogger("nemo2.somewhere").info("at step %d", self.trainer.global_step)
        if self.trainer.global_step == 1:
            warnings.warn("something odd", stacklevel=1)
        self.log_dict({"reduced_train_loss": float(10 - self.trainer.global_step), "lr": 0.1})
        return super().training_step(batch, batch_index)


def trainer_in(tmp_path, **settings):
    return quiet_trainer(**{"max_steps": 4, "default_root_dir": tmp_path, **settings})


def fit(log, trainer, model=None, **setup):
    directory = log.setup(trainer, **setup)
    trainer.fit(model or Model(), torch.utils.data.DataLoader(torch.zeros(8, 1)))
    return directory


def test_a_run_that_ends_before_a_step_is_logged_has_no_report_and_says_so_in_a_line(tmp_path, caplog):
    trainer = trainer_in(tmp_path, max_steps=2)
    trainer.log_every_n_steps = 10
    with caplog.at_level(logging.INFO, logger="nemo2"):
        run = fit(NeMoLogger(name="tiny", log_dir=str(tmp_path)), trainer)
    assert not (run.log_dir / "report.html").exists()
    [told] = [record for record in caplog.records if "report" in record.getMessage()]
    assert "no report was written, because the run has logged no step" in told.getMessage() and not told.exc_info


def test_a_run_leaves_its_metrics_settings_surroundings_logs_and_report(tmp_path):
    class Late(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.log_every_n_steps = 2

    handlers = list(logging.getLogger().handlers)
    log = NeMoLogger(name="tiny", log_dir=str(tmp_path), tensorboard=TensorBoardLogger("tb_logs", name="tiny"))
    run = fit(log, trainer_in(tmp_path, callbacks=[Late()])).log_dir
    assert run.parent == tmp_path / "tiny" and re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run.name)
    assert series(read_metrics(run), "reduced_train_loss") == [(1, 9.0), (3, 7.0)]
    assert json.loads((run / "environment.json").read_text())["world_size"] == 1
    settings = yaml.safe_load((run / "effective_config.yaml").read_text())["trainer"]
    assert (settings["max_steps"], settings["log_every_n_steps"]) == (4, 2), "those in force at the first step"
    assert "training loss, from 9" in (run / "report.html").read_text()
    assert list((run / "tb_logs").glob("events.*"))
    text = (run / "nemo_log_globalrank-0_localrank-0.txt").read_text()
    assert "nemo2.somewhere: at step 3" in text and "something odd" in text
    assert logging.getLogger().handlers == handlers
    logging.getLogger("nemo2.somewhere").warning("after the run")
    assert (run / "nemo_log_globalrank-0_localrank-0.txt").read_text() == text


def test_a_callback_has_the_same_place_in_the_settings_before_and_after_a_resume(tmp_path):
    trainer = trainer_in(tmp_path, callbacks=[Callback()])
    settings = effective_config(trainer, Model())
    trainer.callbacks.insert(0, ResumedRecipe(tmp_path, tmp_path, accept_changes=False))
    assert effective_config(trainer, Model()) == settings and settings["callbacks"]


def test_a_failing_run_still_writes_log_report_and_fault(tmp_path, monkeypatch):
    monkeypatch.setenv(FAULT_DIR_VARIABLE, str(tmp_path / "faults"))
    log = NeMoLogger(explicit_log_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="the disk is full"):
        fit(log, trainer_in(tmp_path), Model(fail_at=2))
    text = (tmp_path / "run" / "nemo_log_globalrank-0_localrank-0.txt").read_text()
    assert "Traceback" in text and "ValueError: the disk is full" in text
    assert (tmp_path / "run" / "report.html").is_file()
    (fault,) = read_faults(tmp_path / "faults")
    assert (fault.kind, fault.message, fault.explained) == ("ValueError", "the disk is full", False)


def test_the_checkpoint_callback_replaces_the_trainers_and_gets_the_run_directory_unless_it_has_one(tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    named, placed = ModelCheckpoint(filename="{step}"), ModelCheckpoint(dirpath=elsewhere, monitor="val_loss")
    for ours in (named, placed):
        trainer = trainer_in(tmp_path, callbacks=[ModelCheckpoint(monitor="other")], enable_checkpointing=True)
        directory = NeMoLogger(log_dir=str(tmp_path), name="n", ckpt=ours).setup(trainer)
        assert [item for item in trainer.callbacks if isinstance(item, ModelCheckpoint)] == [ours]
        assert trainer.callbacks[-1] is ours
        assert ours.dirpath == (str(directory.checkpoints) if ours is named else elsewhere)
    assert (named.filename, placed.filename) == ("{step}", "n--{val_loss:.4f}-{step}-{consumed_samples}")


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        pytest.param({"name": "csv", "version": "one"}, "csv/one", id="of the user"),
        pytest.param({}, "n/first", id="of the run"),
    ],
)
def test_a_resumed_run_appends_to_the_csv_file_of_its_version(tmp_path, named, folder):
    saved(tmp_path / "n" / "first" / "checkpoints" / "step=1", 1)
    for step, metrics in enumerate([{"loss": 3.0}, {"loss": 2.0, "val_loss": 2.5}]):
        trainer = trainer_in(tmp_path, logger=[CSVLogger(str(tmp_path), **named)])
        log = NeMoLogger(log_dir=str(tmp_path), name="n", version="first")
        log.setup(trainer, resume_if_exists=True)
        trainer.loggers[0].log_metrics(metrics, step=step)
        trainer.loggers[0].save()
    lines = (tmp_path / folder / "metrics.csv").read_text().splitlines()
    assert lines == ["loss,step,val_loss", "3.0,0,", "2.0,1,2.5"]


def test_csv_metrics_that_a_kill_left_under_another_name_are_appended_to(tmp_path):
    saved(tmp_path / "n" / "first" / "checkpoints" / "step=1", 1)
    (tmp_path / "n" / "first" / "metrics.before").write_text("loss,step\n3.0,0\n")
    trainer = trainer_in(tmp_path, logger=[CSVLogger(str(tmp_path))])
    NeMoLogger(log_dir=str(tmp_path), name="n", version="first").setup(trainer, resume_if_exists=True)
    trainer.loggers[0].log_metrics({"loss": 2.0}, step=1)
    trainer.loggers[0].save()
    assert (tmp_path / "n" / "first" / "metrics.csv").read_text().splitlines() == ["loss,step", "3.0,0", "2.0,1"]


def test_loggers_of_the_trainer_are_kept_unless_replaced_and_one_may_keep_its_directory(tmp_path):
    mine = CSVLogger(str(tmp_path), name="csv")
    old = TensorBoardLogger(str(tmp_path), name="old")
    new = TensorBoardLogger(str(tmp_path / "mine"), name="x", version="v")
    trainer = trainer_in(tmp_path, logger=[mine, old])
    NeMoLogger(log_dir=str(tmp_path), tensorboard=new, update_logger_directory=False).setup(trainer)
    assert trainer.loggers[:2] == [mine, new] and old not in trainer.loggers
    assert new.log_dir == str(tmp_path / "mine" / "x" / "v")


class _Own(CSVLogger):
    def log_metrics(self, *_, **__):
        raise ValueError("a mistake of its author, or a way to end the run")


def test_a_logger_whose_disk_is_full_is_reported_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise ValueError("you tried to log 1.0") from OSError(errno.ENOSPC, "No space left on device")

    for method in ("log_metrics", "finalize"):
        monkeypatch.setattr(TensorBoardLogger, method, full)
    trainer, log = trainer_in(tmp_path), NeMoLogger(log_dir=str(tmp_path), tensorboard=TensorBoardLogger(str(tmp_path)))
    directory = fit(log, trainer).log_dir
    assert len(series(read_metrics(directory), "reduced_train_loss")) == 4
    [reported] = [record.getMessage() for record in caplog.records if "TensorBoardLogger" in record.getMessage()]
    assert f"{directory}/tb_logs" in reported and "[Errno 28]" in reported


def test_an_error_in_a_users_own_logger_ends_the_run(tmp_path):
    with pytest.raises(ValueError, match="of its author"):
        fit(NeMoLogger(log_dir=str(tmp_path), extra_loggers=[_Own(str(tmp_path))]), trainer_in(tmp_path))


def test_recipe_files_and_the_launchers_notes(tmp_path, monkeypatch):
    handed = tmp_path / "handed.json"
    handed.write_text('{"a": 1}')
    extra = tmp_path / "run.sh"
    extra.write_text("echo")
    monkeypatch.setenv(RECIPE_VARIABLE, str(handed))
    monkeypatch.setenv(RUN_DIR_FILE_VARIABLE, str(tmp_path / "where"))
    run = NeMoLogger(log_dir=str(tmp_path / "r"), files_to_copy=[str(extra)]).setup(trainer_in(tmp_path)).log_dir
    assert (run / "recipe.json").read_text() == '{"a": 1}'
    assert (run / "run.sh").read_text() == "echo"
    assert (tmp_path / "where").read_text() == str(run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"files_to_copy": ["no.sh"]}, r"files_to_copy: no such file: .*no\.sh"),
        ({"files_to_copy": ["a/run.sh", "b/run.sh"]}, "files_to_copy: .*run.sh"),
        ({"files_to_copy": ["a/recipe.json"]}, "files_to_copy: .*recipe.json"),
        ({"log_dir": "a/run.sh"}, r"log\.log_dir: cannot write to .*run\.sh/default.*\. Set a directory that"),
        ({"name": "../up"}, "is not a valid directory name"),
        ({"name": "/abs"}, "is not a valid directory name"),
        ({"name": "a\nb"}, "is not a valid directory name"),
        ({"name": "-rf"}, "is not a valid directory name"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    files = [Path(name) for name in ("a/run.sh", "b/run.sh", "a/recipe.json")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    trainer = trainer_in(tmp_path)
    callbacks = list(trainer.callbacks)
    with pytest.raises(ConfigError, match=words):
        NeMoLogger(**{"log_dir": "runs", **settings}).setup(trainer)
    assert trainer.callbacks == callbacks and trainer.loggers == []
    assert not Path("runs").exists() and all(file.read_text() == "mine" for file in files)


def test_a_place_is_suggested_that_can_be_written_though_the_home_cannot(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/proc/no-home")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=f"NEMORUN_HOME={tmp_path}/runs"):
        create_directory(Path("/proc/no-home/.nemo_run"), field="NEMORUN_HOME")


def test_a_start_on_a_full_disk_says_so_and_what_to_do(tmp_path, monkeypatch):
    from nemo2.training.run_dir import logger as module

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_environment", full)
    with pytest.raises(ConfigError, match=r"No space left on device; [\d.]+ GB are free.*same command again"):
        NeMoLogger(log_dir=str(tmp_path)).setup(trainer_in(tmp_path))


def choose(tmp_path, **settings):
    defaults = {"name": "n", "log_dir": str(tmp_path), "explicit_log_dir": None, "version": None}
    return choose_directory(**defaults | {"use_datetime_version": True, "resume_if_exists": False} | settings)


@pytest.mark.parametrize("resume", [False, True])
def test_nemos_variable_names_the_version_where_the_log_does_not(tmp_path, monkeypatch, resume):
    monkeypatch.setenv("NEMO_EXPM_VERSION", "seventh")
    assert choose(tmp_path, resume_if_exists=resume).log_dir == tmp_path / "n" / "seventh"
    assert choose(tmp_path, version="mine", resume_if_exists=resume).log_dir == tmp_path / "n" / "mine"
    monkeypatch.setenv("NEMO_EXPM_VERSION", "../up")
    with pytest.raises(ConfigError, match="is not a valid directory name"):
        choose(tmp_path)


def test_explicit_directory_version_and_no_version(tmp_path, monkeypatch):
    assert choose(tmp_path, explicit_log_dir=str(tmp_path / "x"), version="v").log_dir == tmp_path / "x"
    assert choose(tmp_path, version="v").log_dir == tmp_path / "n" / "v"
    assert choose(tmp_path, use_datetime_version=False).log_dir == tmp_path / "n"
    monkeypatch.chdir(tmp_path)
    assert choose(tmp_path, log_dir=None, version="v").log_dir == tmp_path / "nemo_experiments" / "n" / "v"


def test_resuming_continues_the_version_that_has_got_furthest_whatever_the_clocks_say(tmp_path, monkeypatch):
    monkeypatch.setenv(VERSION_VARIABLE, "2030-01-01_00-00-00")
    assert choose(tmp_path, resume_if_exists=True).version == "2030-01-01_00-00-00"
    now = time.time()
    saved(tmp_path / "n" / "b" / "checkpoints" / "step=4", 4, saved_at=now)
    saved(tmp_path / "n" / "c" / "checkpoints" / "step=6", 6, saved_at=now - 100)
    (tmp_path / "n" / "d" / "checkpoints" / "torn").mkdir(parents=True)
    chosen = choose(tmp_path, resume_if_exists=True)
    assert (chosen.version, chosen.resumed) == ("c", True)
    assert choose(tmp_path).version == "2030-01-01_00-00-00", "without resume a new run gets its own directory"
    assert choose(tmp_path, resume_if_exists=True, version="b").version == "b"


@pytest.mark.parametrize(
    ("checkpoints", "continued"),
    [
        (
            {
                "a": {"step": 6, "run": "first"},
                "b": {"step": 6, "run": "second", "lineage": ["first"], "saved_at": 1.0},
            },
            "b",
        ),
        ({"a": {"step": 6, "run": "first"}, "b": {"step": 99, "run": "stranger"}}, "a"),
    ],
    ids=["of one step, that which goes on from the other", "not one with a stranger's checkpoint"],
)
def test_of_two_versions_one_is_continued(tmp_path, checkpoints, continued):
    for name, manifest in checkpoints.items():
        saved(tmp_path / "n" / name / "checkpoints" / "saved", **manifest)
    (tmp_path / "n" / "b" / "checkpoints" / ".run").write_text('{"id": "second", "lineage": []}')
    assert choose(tmp_path, resume_if_exists=True).version == continued


def test_leftovers_of_dead_versions_are_deleted_and_those_of_other_runs_stay(tmp_path, monkeypatch):
    from nemo2.checkpoint.lock import DirectoryLock

    monkeypatch.setenv("NEMO2_RUN_VERSION", "now")
    versions = {
        name: tmp_path / "n" / name / "checkpoints" for name in ("dead", "killed", "young", "finished", "written")
    }
    for name, folder in versions.items():
        (folder / ".unfinished-1-step=3" / "weights").mkdir(parents=True)
        if name not in ("killed", "young"):
            os.utime(folder / ".unfinished-1-step=3", (0, 0))
    for name, host in (("killed", socket.gethostname()), ("young", "another")):
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        (versions[name] / ".lock").write_text(json.dumps({"host": host, "pid": process.pid}))
    saved(versions["finished"] / "step=3", 3, saved_at=1.0)
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from nemo2.checkpoint.lock import DirectoryLock
DirectoryLock({str(versions["written"])!r}).acquire()
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdin is not None
        writer.stdout.readline()
        deleted = [versions[name] / ".unfinished-1-step=3" for name in ("dead", "killed")]
        assert delete_leftovers(choose(tmp_path)) == deleted
        writer.stdin.close()
    left = {name for name, folder in versions.items() if list(folder.glob(".unfinished-*"))}
    assert left == {"young", "finished", "written"}
    assert DirectoryLock(versions["dead"]).acquire().release() is None


def test_a_run_without_version_is_resumed_where_it_is(tmp_path):
    saved(tmp_path / "n" / "checkpoints" / "step=10", 10, saved_at=time.time())
    chosen = choose(tmp_path, resume_if_exists=True)
    assert chosen.log_dir == tmp_path / "n" and chosen.version is None and chosen.resumed


def _in_another_second(rank):
    """Another second is another name, if each rank goes by its own clock."""
    time.strftime = lambda form: f"{rank}-seconds-later"


def _directory_on_this_rank(base, resume):
    _in_another_second(os.environ["RANK"])
    return str(choose(Path(base), resume_if_exists=resume).log_dir)


@pytest.mark.parametrize("init_process_group", [True, False], ids=["process group", "only MASTER_ADDR"])
def test_all_ranks_choose_the_same_directory(run_on_ranks, tmp_path, init_process_group):
    chosen = run_on_ranks(
        _directory_on_this_rank, 2, str(tmp_path), False, init_process_group=init_process_group, timeout=60
    )
    assert len(set(chosen)) == 1


def _directory_of_a_task_of_srun(base):
    """As srun starts a task, without torchrun: nothing says RANK, WORLD_SIZE or MASTER_ADDR."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    rank, world_size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ |= {
        "SLURM_NTASKS": world_size,
        "SLURM_NTASKS_PER_NODE": world_size,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
    }
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": os.environ.pop("MASTER_ADDR")}
    _in_another_second(rank)
    strategy = types.SimpleNamespace(cluster_environment=SLURMEnvironment(auto_requeue=False))
    meeting = meeting_of(types.SimpleNamespace(strategy=strategy, num_nodes=1))
    return str(choose(Path(base), meeting=meeting).log_dir)


def test_tasks_of_srun_choose_the_same_directory(run_on_ranks, tmp_path):
    chosen = run_on_ranks(_directory_of_a_task_of_srun, 2, str(tmp_path), init_process_group=False, timeout=60)
    assert len(set(chosen)) == 1, chosen


def test_ranks_that_lightning_starts_later_take_what_the_first_has_decided(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, subprocess, sys
sys.path[:0] = {sys.path!r}
from nemo2.training.run_dir.directory import agree
print(agree(sys.argv[1]), flush=True)
if sys.argv[2:]:
    subprocess.run([sys.executable, __file__, *sys.argv[2:]], check=True)
"""
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "NEMO2"))}
    # The first isn't a child of the process whose decision it has inherited.
    strangers = clean | {"NEMO2_RUN_DECISION": '1234567 {"1": "theirs"}'}
    ran = subprocess.run(
        [sys.executable, script, "first", "later"], capture_output=True, text=True, env=strangers, check=True
    )
    assert ran.stdout.split() == ["first", "first"]


def _setup_with_a_directory_of_its_own(base):
    from nemo2.base.errors import RuntimeFault
    from nemo2.training.run_dir.callback import RunDirectoryCallback
    from nemo2.training.run_dir.directory import RunDirectory

    own = Path(base) / os.environ["RANK"]
    directory = RunDirectory(log_dir=own, exp_dir=own, name="", version=None, resumed=False)
    callback = RunDirectoryCallback(directory, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeFault) as caught:
        callback.setup(None, None, "fit")
    return str(caught.value)


def test_ranks_that_would_write_to_different_directories_are_told_before_they_train(run_on_ranks, tmp_path):
    for message in run_on_ranks(_setup_with_a_directory_of_its_own, 2, str(tmp_path), timeout=60):
        assert f"Rank 0 would write to {tmp_path}/0, but rank 1 to {tmp_path}/1" in message
        assert "log.version" in message


def _agree_then_meet(base):
    """As in a run: the directory is settled first, the process group comes later at the same address."""
    import torch.distributed as dist

    first = str(choose(Path(base)).log_dir)
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return first, total.item()


def test_settling_the_directory_does_not_get_in_the_way_of_the_process_group(run_on_ranks, tmp_path):
    (first, one), (second, two) = run_on_ranks(_agree_then_meet, 2, str(tmp_path), init_process_group=False, timeout=60)
    assert first == second and one == two == 2.0


@pytest.mark.parametrize("own", ["", "logging.basicConfig()"], ids=["no handler", "a handler of the script's own"])
def test_warnings_reach_the_console_once_and_the_file(tmp_path, own):
    script = f"""
import logging, pathlib
from nemo2.training.run_dir.log_files import add_log_file, warn_on_console
{own}
add_log_file(pathlib.Path("log.txt"))
warn_on_console()
warn_on_console()
logging.getLogger("nemo2.somewhere").warning("Falling back to %s.", "step=2")
logging.getLogger("nemo2.somewhere").info("at step 3")
logging.getLogger("another").warning("of somebody else")
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stderr.count("Falling back to step=2.") == 1
    assert bool(own) == ("at step 3" in ran.stderr) == ("of somebody else" in ran.stderr)
    assert (tmp_path / "log.txt").read_text().count("Falling back to step=2.") == 1


def test_a_log_file_that_cannot_be_written_is_reported_once_and_ends_nothing(tmp_path, capsys):
    """Another library closes the handlers, as `logging.config.dictConfig` does, and the folder is gone."""
    folder = tmp_path / "run"
    folder.mkdir()
    add_log_file(folder / "log.txt")
    logging.getLogger().handlers[-1].close()
    shutil.rmtree(folder)
    for step in range(3):
        logging.getLogger("nemo2.somewhere").info("at step %d", step)
    assert capsys.readouterr().err.count(f"{folder}/log.txt can't be written") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_so_is_a_full_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nemo2.training.run_dir.log_files.open_to_write", os.open)
    add_log_file(Path("/dev/full"))
    for step in range(3):
        logging.getLogger("nemo2.somewhere").info("at step %d", step)
    assert capsys.readouterr().err.count("/dev/full can't be written: [Errno 28]") == 1


def test_a_job_that_is_started_again_goes_on_with_its_own_run(tmp_path, monkeypatch):
    """Another job of the same name has got further meanwhile."""
    for name in ("mine", "other"):
        (tmp_path / "n" / name / "checkpoints").mkdir(parents=True)
    said = tmp_path / "run_dir"
    monkeypatch.setenv("NEMO2_RUN_DIR_FILE", str(said))
    monkeypatch.setattr("nemo2.training.run_dir.directory.furthest_run", lambda root: root / "other")
    for text, settings, version in (
        (None, {}, "other"),  # the first start
        (f"{tmp_path}/n/mine", {}, "mine"),
        (f"{tmp_path}/n/mine", {"version": "asked"}, "asked"),
        ("/elsewhere/mine", {}, "other"),
    ):
        if text is not None:
            said.write_text(text)
        assert choose(tmp_path, resume_if_exists=True, **settings).log_dir == tmp_path / "n" / version


def test_runs_that_begin_in_one_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo2.training.run_dir.directory.timestamp", lambda: "2026-01-02_03-04-05")
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)
    for suffix in ("", "_2", "_3"):
        directory = choose(tmp_path)
        directory.log_dir.mkdir(parents=True)
        assert directory.version == f"2026-01-02_03-04-05{suffix}"


@pytest.mark.parametrize("version", [None, "mine"])
def test_a_launch_looks_at_the_run_that_the_ranks_continue(tmp_path, monkeypatch, version):
    monkeypatch.setenv(NAMED_VERSION_VARIABLE, "named")
    log = NeMoLogger(name="n", log_dir=str(tmp_path), version=version)
    chosen = choose(tmp_path, version=version, resume_if_exists=True)
    assert directory_to_continue(log, newest=True) == chosen.log_dir == tmp_path / "n" / (version or "named")


def modes_under(umask: int, directory: str) -> dict[str, int]:
    """Permissions of all that a run writes, its background saves included."""
    from tests.long.drill.command import Run, train

    os.umask(umask)
    train(Run(Path(directory), world=1, asynchronous=True))
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in Path(directory).rglob("*")}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_may_read_a_run_is_said_by_its_users_umask(run_on_ranks, tmp_path, umask):
    """Runs are shared, and hold no secrets; `umask 077` before a command keeps one to oneself."""
    found = run_on_ranks(modes_under, 1, umask, str(tmp_path / "private"))[0]
    names = {Path(path).name for path in found}
    assert {
        "metrics.jsonl",
        "effective_config.yaml",
        "environment.json",
        "manifest.json",
        "model.json",
        "report.html",
    } <= names
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o777 & umask} == {}
    assert umask == 0o077 or all(mode & 0o044 == 0o044 for mode in found.values()), found
