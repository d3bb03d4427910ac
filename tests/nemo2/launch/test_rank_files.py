# SPDX-License-Identifier: Apache-2.0
"""A launching script that parses arguments at module level gets its own in every rank."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nemo2.launch.rank_files import with_arguments

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = textwrap.dedent(
    """
    \"\"\"What a user's script looks like.\"\"\"

    from __future__ import annotations

    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("-n", "--name", default="")
    arguments = parser.parse_args()


    def work(place: str) -> None:
        Path(place).write_text(f"{arguments.lr} {arguments.name}")


    if __name__ == "__main__":
        from nemo2.config import Partial
        from nemo2.launch import launch

        launch(Partial(work, place="done"), EXECUTOR, devices=1, nodes=1, name="own", check=False)
    """
).lstrip()
SLURM = """(__import__("nemo_run").SlurmExecutor(account="", time="30",
    tunnel=__import__("nemo_run").LocalTunnel(job_dir=str(Path("jobs").resolve()))))"""


def run_script(folder: Path, text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NEMORUN_HOME": str(folder / "home"), **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_ranks_on_this_machine_see_the_scripts_arguments(tmp_path, warm_interpreter):
    done = run_script(tmp_path, SCRIPT.replace("EXECUTOR", '"local"'), "--lr", "0.5", "-n", 'it\'s "quoted"')
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "done").read_text() == '0.5 it\'s "quoted"'


def test_ranks_of_a_job_on_slurm_see_the_scripts_arguments(tmp_path, warm_interpreter):
    from nemo2.launch.rank import CONFIG, MAIN

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    text = SCRIPT.replace("EXECUTOR", SLURM).replace("check=False", "check=False, detach=True")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run_script(tmp_path, text, "--lr", "0.5", "--name", "mine", PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "jobs" / "own").iterdir()
    assert (folder / CONFIG).is_file() and (folder / MAIN).is_file()
    rank = [sys.executable, "-m", "nemo2.launch.rank", str(folder)]
    subprocess.run(rank, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert (tmp_path / "done").read_text() == "0.5 mine"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "import sys\nseen = sys.argv",
        '"""Words."""\nimport sys\nseen = sys.argv\n',
        '"""Words."""',
        '"""Two\nlines."""\nfrom __future__ import (\n division)\nimport sys\nseen = sys.argv',
        "# a comment\n\nfrom __future__ import annotations  # more\ndef f(x: NoSuchName): ...\nimport sys\nseen = sys.argv",
        "#!/usr/bin/env python\n'words'; from __future__ import annotations\nimport sys\nseen = sys.argv",
    ],
)
def test_the_arguments_are_set_before_the_first_statement_that_python_lets_stand_there(monkeypatch, source):
    monkeypatch.setattr(sys, "argv", ["rank"])
    names: dict = {}
    exec(compile(with_arguments(source, ["a b", "--x=\n"]), "train.py", "exec"), names)
    assert sys.argv == ["a b", "--x=\n"] and names.get("seen", sys.argv) == sys.argv
