# SPDX-License-Identifier: Apache-2.0
"""Every place that finds a configuration file by itself refuses one of another user. The table is in docs/security.md."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import nemo_run
import pytest

from nemo2.base.errors import SecurityError
from nemo2.cli.nemo_run import refuse_untrusted_workspace
from nemo2.launch import launch, trusted_files
from nemo2.launch.clusters import profiles, resolve_executor, user_file
from nemo2.launch.slurm.submission import Submission, submissions
from nemo2.launch.trusted_files import read_trusted, refuse_untrusted_kernel_cache

ROOT = Path(__file__).resolve().parents[3]
PROFILE = '[clusters.mine]\nkind = "slurm"\nsetup_lines = "touch ran"\n'
STRANGER = 12345

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "nemo_run"))
    monkeypatch.setattr("nemo_run.cli.api.INCLUDE_WORKSPACE_FILE", True)
    (tmp_path / "project" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "inside")
    return tmp_path


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def in_the_project(home: Path) -> Path:
    write(user_file(), '[clusters.mine]\nkind = "local"\n')
    return write(home / "project" / "inside" / "nemo2.toml", PROFILE)


def above_the_project(home: Path) -> Path:
    write(user_file(), '[clusters.mine]\nkind = "local"\n')
    return write(home / "nemo2.toml", PROFILE)


def of_the_user(home: Path) -> Path:
    return write(user_file(), PROFILE)


def executors(home: Path) -> Path:
    text = "import nemo_run, pathlib\npathlib.Path('ran').touch()\ndef mine(): return nemo_run.LocalExecutor()\n"
    return write(home / "nemo_run" / "executors.py", text)


def submission(home: Path) -> Path:
    Submission(name="mine", folder=str(home / "jobs" / "mine_1"), jobs=["7"]).save()
    return submissions() / "mine_1.json"


def workspace(home: Path) -> Path:
    return write(home / "workspace.py", "open('ran', 'w')")


def kernel_cache(home: Path) -> Path:
    (home / "kernels").mkdir()
    return home / "kernels"


def read_submissions() -> None:
    from nemo2.cli import submitted

    submitted.submissions()


PLACES: dict[Callable[[Path], Path], Callable[[], object]] = {
    in_the_project: lambda: resolve_executor("mine"),
    above_the_project: lambda: resolve_executor("mine"),
    of_the_user: profiles,
    executors: lambda: resolve_executor("mine"),
    submission: read_submissions,
    workspace: refuse_untrusted_workspace,
    kernel_cache: lambda: refuse_untrusted_kernel_cache(os.path.abspath("../../kernels")),
}


@pytest.mark.parametrize(("place", "read"), PLACES.items(), ids=[place.__name__ for place in PLACES])
def test_a_file_that_another_user_could_have_written_configures_nothing(home, place, read):
    file = place(home)
    read()
    own = file.stat()
    for change in (
        lambda: os.chown(file, STRANGER, STRANGER),
        lambda: file.chmod(own.st_mode | 0o002),
        lambda: link_of_a_stranger(file),
    ):
        change()
        with pytest.raises((SecurityError, SystemExit), match="belongs to another user|is writable by everybody"):
            read()
        os.chown(file, own.st_uid, own.st_gid, follow_symlinks=False)
        file.chmod(own.st_mode)
    assert not list(home.rglob("ran")) or place is executors, "nothing of it was run"


def link_of_a_stranger(file: Path) -> None:
    """Put a stranger's link to a file of this user in its place."""
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))
    os.chown(file, STRANGER, STRANGER, follow_symlinks=False)


def test_a_strangers_profile_stops_the_command_with_the_file_and_the_way_out(home, command):
    file = in_the_project(home)
    assert "setup_lines" in command("cluster show mine").out
    os.chown(file, STRANGER, STRANGER)
    said = command("cluster show mine", code=2)
    assert "setup_lines = " not in said.out
    assert str(file) in said.err and str(STRANGER) in said.err and "a copy of your own" in said.err


def test_the_file_that_was_opened_is_the_one_that_is_judged(home, monkeypatch):
    file = of_the_user(home)
    os.chown(file, STRANGER, STRANGER)
    monkeypatch.setattr(trusted_files, "refuse_untrusted", lambda *_, **__: None)  # replaced after it was looked at
    with pytest.raises(SecurityError):
        read_trusted(file, effect="it decides")


def test_nemo_runs_own_command_does_not_run_a_strangers_workspace(home, warm_interpreter):
    file = workspace(home)
    os.chown(file, STRANGER, STRANGER)
    program = write(home / "own.py", "import nemo_run as run\nfrom nemo2 import llm\nrun.cli.main(llm.pretrain)\n")
    done = subprocess.run(
        [warm_interpreter, str(program), "--factory", "llama_tiny", "--dryrun", "--yes"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0 and "belongs to another user" in done.stderr
    assert not list(home.rglob("ran"))


def test_a_kernel_cache_is_created_for_this_user_alone(home):
    refuse_untrusted_kernel_cache(str(home / "new" / "kernels"))
    assert (home / "new" / "kernels").stat().st_mode & 0o077 == 0
    refuse_untrusted_kernel_cache(None)


def test_a_launch_on_this_machine_loads_no_kernels_of_a_stranger(home):
    from nemo2 import llm

    cache = kernel_cache(home)
    os.chown(cache, STRANGER, STRANGER)
    recipe = llm.llama_tiny.pretrain_recipe(dir=str(home / "runs"))
    executor = nemo_run.LocalExecutor(env_vars={trusted_files.KERNEL_CACHE: str(cache)})
    with pytest.raises(SecurityError, match=str(cache)):
        launch(recipe, executor, devices=2)
