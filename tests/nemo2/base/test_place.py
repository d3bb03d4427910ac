# SPDX-License-Identifier: Apache-2.0
"""Who a process is, in the variables of each launcher."""

import ast
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from nemo2.base.place import OF_A_RANK, Place, _first_host, here, usable_cores

SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


MPI = ("mpirun", 2, 4, 0, True)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("variables", 5, 8, 1, True)),  # that a script or an actor of Ray has set
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, MPI),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, MPI),
        # What Lightning starts on a node is told by its local rank, but decides nothing.
        (TORCHRUN | {"RANK": "", "WORLD_SIZE": "2"}, ("lightning", 1, 2, 1, False)),
        *[
            ({name: value for name, value in SRUN.items() if name != missing}, ("none", 0, 1, 0, False))
            for missing in ("SLURM_PROCID", "SLURM_STEP_ID")  # a batch script is no rank
        ],
    ],
)
def test_a_rank_is_told_by_the_variables_of_its_launcher(variables, expected):
    place = here(variables)
    assert (place.launcher, place.rank, place.world_size, place.local_rank, place.launched) == expected
    assert place.job == variables.get("SLURM_JOB_ID", place.job)


def test_torchrun_under_srun_is_torchruns():
    under = {"SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}
    expected = {
        "rank": 5,
        "world_size": 8,
        "local_rank": 1,
        "address": "a",
        "port": 29500,
        "restarts": 2,
        "job": "123456",
    }
    assert here(SRUN | TORCHRUN | under) == Place(launcher="torchrun", **expected)


def test_a_task_of_srun_is_a_rank_and_meets_where_lightning_has_it_meet(monkeypatch):
    variables = {**SRUN, "SLURM_JOB_NODELIST": "gpu[03-05,9],login"}
    place = here(variables)
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("srun", 3, 4, 1)
    for name in OF_A_RANK:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "gpu[03-05,9],login"}.items():
        monkeypatch.setenv(name, value)
    lightnings = SLURMEnvironment(auto_requeue=False)
    assert (place.address, place.port) == (lightnings.main_address, lightnings.main_port)


def test_the_address_that_a_job_script_names_is_where_tasks_of_srun_meet():
    place = here({**SRUN, "SLURM_JOB_NODELIST": "n1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"})
    assert (place.address, place.port) == ("10.0.0.1", 23456)


def test_nothing_and_garbage_are_a_process_of_its_own():
    assert here({}) == Place() == here({"RANK": "", "LOCAL_RANK": "two", "SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1,n2", "n1"), ("n[1-2]", "n1"), ("n[7]-ib,m", "n7-ib"), ("n", "n"), ("", None), (None, None)],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert _first_host(nodes) == first


def test_nobody_else_reads_a_launchers_variables():
    """Strings anywhere in our code, docstrings and what is written into a script or a child's environment aside."""
    root = Path(__file__).resolve().parents[3]
    # probe.py has to speak where nemo2 is not installed; the others write them.
    writes = {"place.py", "probe.py", "rank.py", "environment.py", "script.py"}
    readers = [
        f"{file.name}:{node.lineno}"
        for folder in ("nemo2", "callbacks", "recipes")
        for file in (root / folder).rglob("*.py")
        if file.name not in writes
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in OF_A_RANK
    ]
    assert readers == []


@pytest.mark.parametrize(("limit", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", 16.0), (None, 16.0)])
def test_a_container_limits_the_usable_cores(monkeypatch, tmp_path, limit, cores):
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr("nemo2.base.place.CPU_LIMIT", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert usable_cores() == cores
