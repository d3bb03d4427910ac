# SPDX-License-Identifier: Apache-2.0
"""Defects that are put into a cluster or a profile on purpose: `nemo2 cluster test` has to name each."""

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.long.cluster.runs import Cluster

_DISK_MB = 16
"""A job's folder fits into it as long as nothing else is there."""


def defects(cluster: Cluster, told: list[str]) -> list[str]:
    """Test nine of the ten defects in turn, after a test without defects. `no_accounting` is the tenth."""
    found = _tested(cluster, "well", "the all-reduce over 2 nodes is correct. Runs can start.", stops=False)
    found += _tested(cluster, "partition", r"invalid partition.*sinfo", partition="nowhere")
    found += _tested(cluster, "python", "no/python does not exist there", python="/no/python")
    found += _tested(cluster, "image", "no pyxis", container_image="a/b:c")
    for defect in (_version, _clock, _loopback, _unshared, _port, _full):
        found += defect(cluster)
    told.append(f"{10 - len(found)} of 10 were named" if not found else f"{len(found)} were not named")
    return found


def no_accounting(cluster: Cluster) -> list[str]:
    return _tested(cluster, "accounting", "note: no accounting", stops=False)


def _tested(cluster: Cluster, name: str, words: str, *, stops: bool = True, **profile: Any) -> list[str]:
    place = cluster.folder / f"test-{name}"
    place.mkdir(exist_ok=True)
    fields = {"kind": "slurm", "partition": "batch", "time": "30", "job_dir": str(place / "jobs"), **profile}
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    (place / "nemo2.toml").write_text("\n".join(["[clusters.here]", *lines]) + "\n")
    said = cluster.run(sys.executable, "-m", "nemo2", "cluster", "test", "here", cwd=place, check=False)
    named = re.search(words, said) and ("runs will fail" in said) == stops
    return [] if named else [f"{name}: {words!r} is not in: {said}"]


def _on_node2(cluster: Cluster, name: str, shell: str) -> str:
    """A Python that runs a line of shell before it, on node2 alone."""
    python = cluster.folder / f"python-{name}"
    python.write_text(f'#!/bin/sh\nif [ "$(hostname)" = node2 ]; then {shell}; fi\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def _version(cluster: Cluster) -> list[str]:
    other = cluster.folder / "other" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    python = _on_node2(cluster, "version", f"export PYTHONPATH={other.parent}:$PYTHONPATH")
    return _tested(cluster, "version", "torch is 1.0 on node2", python=python)


def _clock(cluster: Cluster) -> list[str]:
    """Python's own, for there is one clock of the machine."""
    late = cluster.folder / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 300\n")
    python = _on_node2(cluster, "clock", f"export PYTHONPATH={late}:$PYTHONPATH")
    return _tested(cluster, "clock", r"the clock of node2 is \+\d+ s off", python=python)


def _loopback(cluster: Cluster) -> list[str]:
    hosts = cluster.folder / "s" / "etc" / "hosts"
    before = hosts.read_text()
    hosts.write_text(f"127.0.1.1 node1 node2\n{before}")
    try:
        return _tested(cluster, "hosts", r"resolves to 127\.0\.1\.1", stops=False)
    finally:
        hosts.write_text(before)


def _unshared(cluster: Cluster) -> list[str]:
    """A disk of node2's own in the place of the jobs' folder."""
    jobs = cluster.folder / "test-unshared" / "jobs"
    jobs.mkdir(parents=True)
    with _mounted(cluster, "node2", jobs):
        return _tested(cluster, "unshared", "node2.*not shared|is not shared|is not visible there")


def _full(cluster: Cluster) -> list[str]:
    jobs = cluster.folder / "test-full" / "jobs"
    jobs.mkdir(parents=True)
    cluster.run("mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(jobs))
    try:
        with _bound(cluster, jobs):
            (jobs / "others").write_bytes(bytes((_DISK_MB - 2) * 2**20))
            found = _tested(cluster, "full", "GB are free|disk.*is full")
            with open(jobs / "others", "ab", buffering=0) as file, _until_full():
                while file.write(bytes(4096)):
                    pass
            return found + _tested(cluster, "full", "disk.*is full")
    finally:
        cluster.run("umount", str(jobs))


@contextmanager
def _until_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != 28:
            raise


def _port(cluster: Cluster) -> list[str]:
    """The ports of the next jobs, on node1 at its own address."""
    last = max((int(word) for word in cluster.run("sacct", "-nXo", "jobid%20").split() if word.isdecimal()), default=0)
    ports = [20000 + (last + ahead) % 10000 for ahead in range(1, 4)]
    with _listening(cluster, ports):
        return _tested(cluster, "port", r"port \d+ of node1 is in use", stops=False)


@contextmanager
def _listening(cluster: Cluster, ports: list[int]) -> Iterator[None]:
    """Sockets in node1's network: a thread that enters it opens them."""
    sockets: list[socket.socket] = []

    def listen() -> None:
        import ctypes

        name = next(one for one in cluster.run("ip", "netns", "list").split() if one in _namespaces(cluster, "node1"))
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000):
                raise OSError(ctypes.get_errno(), "setns")
        for port in ports:
            sockets.append(socket.create_server((_address(cluster, "node1"), port)))

    _in_thread(listen)
    try:
        yield
    finally:
        for one in sockets:
            one.close()


def _in_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _namespaces(cluster: Cluster, node: str) -> list[str]:
    """Names of network namespaces with this cluster's address of a node."""
    told = cluster.run("ip", "netns", "list").split()
    own = [one for one in told if one.endswith(f"-{node}")]
    return [one for one in own if _address(cluster, node) in cluster.run("ip", "-n", one, "-4", "addr", check=False)]


def _address(cluster: Cluster, node: str) -> str:
    found = re.search(rf"NodeName={node} .*?NodeAddr=(\S+)", (cluster.folder / "s" / "slurm.conf").read_text())
    assert found is not None
    return found[1]


def _daemon(cluster: Cluster, node: str) -> str:
    return (cluster.folder / "s" / "pids" / f"slurmd-{node}").read_text().split()[0]


def _inside(cluster: Cluster, node: str, *command: str) -> None:
    """A command among the mounts of a node, which are its own."""
    cluster.run("nsenter", f"--mount=/proc/{_daemon(cluster, node)}/ns/mnt", *command)


@contextmanager
def _mounted(cluster: Cluster, node: str, place: Path) -> Iterator[None]:
    _inside(cluster, node, "mount", "-t", "tmpfs", "tmpfs", str(place))
    try:
        yield
    finally:
        _inside(cluster, node, "umount", "--lazy", str(place))


@contextmanager
def _bound(cluster: Cluster, place: Path) -> Iterator[None]:
    """A mount of this machine on both nodes, too: they were given theirs when they booted, so they boot again."""
    for node in ("node1", "node2"):
        cluster.script("crash", node)
        cluster.script("start", node)
    cluster.wait_until_idle()
    try:
        yield
    finally:
        for node in ("node1", "node2"):
            _inside(cluster, node, "umount", "--lazy", str(place))
