# SPDX-License-Identifier: Apache-2.0
"""One case in a process of its own: its arms in turn, the figures of each as they come, one JSON line per turn."""

import argparse
import dataclasses
import json
import os
import socket
import traceback
import warnings

from bench.gpu.cases import Case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", help="the fields of a Case as JSON")
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    arguments = parser.parse_args()
    case = Case(**json.loads(arguments.case))
    start_alone()

    from bench.gpu.arms import take_turn

    dropped: set[str] = set()
    for repeat in range(arguments.repeats):
        for arm in arguments.arms:
            if arm in dropped:
                continue
            try:
                turn = take_turn(arm, case, steps=arguments.steps, warm_up=arguments.warm_up)
                tell({"arm": arm, "repeat": repeat, **dataclasses.asdict(turn)})
            except Exception as error:  # out of memory above all: the other arms still count
                dropped.add(arm)
                traceback.print_exc()
                tell(
                    {
                        "arm": arm,
                        "repeat": repeat,
                        "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}",
                    }
                )


def start_alone() -> None:
    """A world of one rank."""
    warnings.filterwarnings("ignore")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # CUDA graphs beside expandable segments require it

    import torch

    from nemo2.base.backend import get_backend

    backend = get_backend()
    backend.install()
    backend.set_device(torch.device("cuda", 0))
    torch.distributed.init_process_group(backend.process_group_backend)


def tell(figures: dict) -> None:
    print("TURN " + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
