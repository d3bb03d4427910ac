# SPDX-License-Identifier: Apache-2.0
"""One rank of `support.ranks.run`; run by path in a process forked from a server that has torch loaded.

`JOB` is put among the globals by the parent.
"""

import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import pickle
import sys
import time
import traceback


class ModulesByPath(importlib.abc.MetaPathFinder):
    """Finds the parent's test modules by the files they came from: pytest's importlib mode gives them names that
    `import` cannot resolve, and pickle refers to functions by those names."""

    def __init__(self, files: dict[str, str]):
        self.files = files
        self.packages = {
            name.rsplit(".", depth + 1)[0]: str(pathlib.Path(file).parents[depth])
            for name, file in files.items()
            for depth in range(name.count("."))
        }

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.files:
            return importlib.util.spec_from_file_location(fullname, self.files[fullname])
        if fullname in self.packages:
            spec = importlib.machinery.ModuleSpec(fullname, loader=None, is_package=True)
            spec.submodule_search_locations = [self.packages[fullname]]
            return spec
        return None


def main(job) -> None:
    os.setsid()  # the processes this rank starts can then be ended with it
    stacks = open(job["stacks"], "w")  # noqa: SIM115 # stays open for as long as this process lives
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(job["timeout"], file=stacks)
    if job["errors"] is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(job["errors"], os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(job["environment"])
    sys.meta_path.insert(0, ModulesByPath(job["modules"]))
    try:
        answer = ("result", pickle.dumps(_call(job)), time.process_time())
    except BaseException as error:
        answer = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
    job["connection"].send((time.time(), *answer))
    job["connection"].close()
    # Skip the interpreter's teardown: it may wait for peers that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _call(job):
    import torch

    torch.set_num_threads(1)  # also makes torch's thread pool anew, which a backward pass's threads must not do at once
    if job["store"] is not None:
        from datetime import timedelta

        if torch.cuda.is_available():
            torch.cuda.set_device(int(job["environment"]["LOCAL_RANK"]))
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{job['store']}",
            rank=int(job["environment"]["RANK"]),
            world_size=int(job["environment"]["WORLD_SIZE"]),
            timeout=timedelta(seconds=job["timeout"]),
        )
    function, args, kwargs = pickle.loads(job["call"])
    result = function(*args, **kwargs)
    if torch.cuda.is_available():  # the process that asked compares with tensors of its own, on the CPU
        result = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result)
    if job["store"] is not None:
        torch.distributed.barrier()  # no rank leaves while another still reads from it
    return result


if "JOB" in globals():
    main(JOB)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
