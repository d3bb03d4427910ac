# SPDX-License-Identifier: Apache-2.0
"""Examines the machine: cores, memory, disk, GPUs, communication between ranks, and executors."""

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from nemo2.base.counts import byte_size
from nemo2.base.place import usable_cores
from nemo2.preflight.doctor.finding import Finding, State, checked

TOPIC = "This machine"
LEAST_SHARED_MEMORY = 256 * 2**20
"""The recommended bytes of /dev/shm, in which loader workers pass batches. Containers have 64 MiB by default."""
LEAST_DISK = 20 * 2**30
"""The recommended free bytes of the disk. A checkpoint takes 14 bytes per parameter (bf16 weights, fp32 main parameters
and two moments), so 20 GiB hold a checkpoint of 1.5 billion parameters."""
GLOO_SECONDS = 3.0

_FORMATS = {"fp8": "delayed", "fp8 blockwise": "blockwise", "mxfp8": "mxfp8", "fp4": "nvfp4"}
"""The names of formats below 16 bits, and the recipe that needs each."""


def resources() -> Iterator[Finding]:
    """Cores, memory, shared memory and disk that a run may use."""
    yield Finding(topic=TOPIC, name="CPU cores", state="ok", value=f"{usable_cores():g}")
    try:
        import psutil

        memory = psutil.virtual_memory()
        value = f"{byte_size(memory.available)} free of {byte_size(memory.total)}"
        yield Finding(topic=TOPIC, name="memory", state="ok", value=value)
    except ImportError:
        pass  # reported among the packages
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        yield checked(
            free >= LEAST_SHARED_MEMORY,
            otherwise="note",
            topic=TOPIC,
            name="shared memory",
            value=f"{byte_size(free)} free in /dev/shm",
            costs="data loader workers use it to pass batches, and die with a bus error when it is full",
            fix="start the container with --shm-size=8g or --ipc=host, or set data.num_workers=0",
        )
    free = shutil.disk_usage(Path.cwd()).free
    yield checked(
        free >= LEAST_DISK,
        otherwise="note",
        topic=TOPIC,
        name="disk",
        value=f"{byte_size(free)} free in the working directory",
        costs="checkpoints take about 14 bytes per parameter",
        fix="log to a larger disk (--dir, log.log_dir)",
    )


def devices() -> Iterator[Finding]:
    """The GPUs and their number formats. Without GPUs: what the CPU can do."""
    import torch

    build = f"torch {torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}"
    if not torch.cuda.is_available():
        state: State = "ok"
        costs = fix = ""
        if shutil.which("nvidia-smi") is not None:
            state = "broken"
            if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
                state, costs = "note", "CUDA_VISIBLE_DEVICES hides the GPUs of this machine"
                fix = "unset CUDA_VISIBLE_DEVICES"
            elif torch.version.cuda is None:
                costs = "this machine has an NVIDIA driver, but this torch is built for CPUs"
                fix = "install torch from PyTorch's CUDA index (https://pytorch.org/get-started/locally)"
            else:
                costs = "this machine has an NVIDIA driver, but torch can't use it: it may be older than torch's CUDA"
                fix = "nvidia-smi shows the driver's CUDA version; install a torch for this version or an older one"
        yield Finding(topic=TOPIC, name="GPUs", state=state, value=f"none ({build})", costs=costs, fix=fix)
        value = (
            f"up to {max(1, int(usable_cores()))} CPU processes over gloo at full speed: nemo2 pretrain llama_tiny "
            "--devices 2"
        )
        yield Finding(topic=TOPIC, name="can run", state="ok", value=value)
        return
    from nemo2.mcore.precision import what_is_lacking

    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        have = (properties.major, properties.minor)
        formats = ["bf16" if have >= (8, 0) else "fp16"]
        formats += [name for name, recipe in _FORMATS.items() if what_is_lacking(recipe, capability=have) is None]
        value = f"{properties.name}, {byte_size(properties.total_memory)}, {', '.join(formats)} ({build})"
        yield Finding(topic=TOPIC, name=f"GPU {index}", state="ok", value=value)


def network() -> Iterator[Finding]:
    """Whether ranks of this machine can connect to each other."""
    import torch.distributed as dist

    if not dist.is_available():
        fix = "install a torch with torch.distributed"
        yield Finding(topic=TOPIC, name="torch.distributed", state="broken", value="not built in", fix=fix)
        return
    requested = os.environ.get("GLOO_SOCKET_IFNAME")
    interfaces = [name for _, name in socket.if_nameindex()]
    if requested and requested.lstrip("^=").split(",")[0] not in interfaces:
        yield Finding(
            topic=TOPIC,
            name="GLOO_SOCKET_IFNAME",
            state="broken",
            value=f"{requested}, but this machine has {', '.join(interfaces)}",
            fix="unset GLOO_SOCKET_IFNAME, or set it to one of these interfaces",
        )
        return
    problem = try_gloo()
    yield checked(
        problem is None,
        topic=TOPIC,
        name="gloo",
        value=problem or "works",
        costs="CPU ranks communicate over gloo, and GPU ranks use it for checkpoints",
        fix="export GLOO_SOCKET_IFNAME=lo (one machine), or the interface that reaches the other nodes",
    )
    import torch

    if torch.cuda.is_available():
        from torch.cuda import nccl

        available = dist.is_nccl_available()
        value = ".".join(map(str, nccl.version())) if available else "not built in"
        yield checked(available, topic=TOPIC, name="NCCL", value=value, fix="install torch from PyTorch's CUDA index")


def launchers() -> Iterator[Finding]:
    """The executors that nemo-run could use from here, and the folder with nemo-run's job records."""
    for name, program, costs in (
        ("Slurm", "sbatch", "SlurmExecutor needs an SSHTunnel to a machine with sbatch"),
        ("Docker", "docker", "no DockerExecutor on this machine"),
        ("Kubernetes", "kubectl", "no Kubernetes executors on this machine"),
    ):
        path = shutil.which(program)
        value = path or f"no {program}"
        yield checked(path, otherwise="absent", topic="Launching", name=name, value=value, costs=costs)
    home = Path(os.environ.get("NEMORUN_HOME") or "~/.nemo_run").expanduser()
    existing = next(path for path in (home, *home.parents) if path.exists() or path == path.parent)
    yield checked(
        existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        topic="Launching",
        name="NEMORUN_HOME",
        value=str(home),
        costs="nemo-run keeps its experiments in this directory, which isn't writable",
        fix="export NEMORUN_HOME=<a writable directory>",
    )


def try_gloo(seconds: float = GLOO_SECONDS) -> str | None:
    """Reduce a number in a world of one rank. Returns the problem, or None.

    This runs in a thread, because gloo takes very long if the host's own name does not resolve.
    """
    answer: list[str | None] = []

    def reduce() -> None:
        import torch
        import torch.distributed as dist

        try:
            from torch._C._distributed_c10d import HashStore

            gloo: Any = dist.ProcessGroupGloo
            group = gloo(HashStore(), 0, 1, timedelta(seconds=seconds))
            ones = torch.ones(1)
            group.allreduce([ones]).wait()
            answer.append(None if ones.item() == 1 else f"reduced 1 to {ones.item()}")
        except Exception as error:  # gloo raises many kinds of RuntimeError; all mean that it doesn't work here
            answer.append(str(error).splitlines()[0] if str(error) else type(error).__name__)

    worker = threading.Thread(target=reduce, daemon=True)
    worker.start()
    worker.join(seconds)
    return answer[0] if answer else f"no answer within {seconds:g} s"
