# SPDX-License-Identifier: Apache-2.0
"""Runs in each task of ``nemo2 cluster test``: reports what the task sees, then sums one number over all tasks.

It uses only the standard library until it has reported, so that a node without torch or nemo2 can say so. Run it as a
file, ``python probe.py FOLDER``, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

import importlib.metadata
import json
import os
import shutil
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

PACKAGES = ("nemo2", "torch", "lightning", "megatron-core", "nemo-run", "transformer-engine")


def facts(folder: Path) -> dict:
    """This node's facts, as plain data."""
    name = socket.gethostname()
    try:
        addresses = sorted({one[4][0] for one in socket.getaddrinfo(name, None)})
    except OSError as error:
        addresses = [str(error)]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "rank": int(os.environ["RANK"]),
        "host": name,
        "addresses": addresses,
        "time": time.time(),
        "python": sys.version.split()[0],
        "versions": versions,
        "sees_folder": (folder / "token").is_file(),
        "token": (folder / "token").read_text() if (folder / "token").is_file() else None,
        "free_gb": round(shutil.disk_usage(folder).free / 1e9, 2) if folder.is_dir() else None,
    }


def devices() -> dict:
    """The GPUs that torch sees on this node, or torch's message if it sees none."""
    try:
        import torch
    except ImportError:
        return {}
    seen = {"gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0, "cuda": torch.version.cuda}
    if not seen["gpus"]:
        try:
            torch.cuda.init()
        except Exception as error:
            seen["no_gpu"] = _first_line(error)
    return seen


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def add_up(seconds: float) -> dict:
    """An all-reduce over all tasks, with its result as plain data."""
    started = time.monotonic()
    try:
        import torch
        import torch.distributed as dist

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        try:
            from nemo2.launch.rank import INTERFACE_VARIABLE, interface_towards

            if interface := interface_towards(os.environ.get("MASTER_ADDR")):
                os.environ.setdefault(INTERFACE_VARIABLE, interface)
        except ImportError:
            pass
        dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=seconds))
        one = torch.ones(1, device="cuda" if gpus else "cpu")
        dist.all_reduce(one)
        total = int(one.item())
        dist.destroy_process_group()
        return {"sum": total, "seconds": round(time.monotonic() - started, 1)}
    except Exception as error:
        return {"sum": None, "error": f"{type(error).__name__}: {_first_line(error)}"}


def main() -> None:
    folder = Path(sys.argv[1])
    report = facts(folder)
    print("probe " + json.dumps(report), flush=True)
    print("probe " + json.dumps({"rank": report["rank"], **devices()}), flush=True)
    print("probe " + json.dumps({"rank": report["rank"], **add_up(60.0)}), flush=True)


if __name__ == "__main__":
    main()
