# SPDX-License-Identifier: Apache-2.0
"""Seconds to the first step on two nodes: `nemo2 pretrain`, and a bare ``sbatch`` with torchrun of the same recipe."""

import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.long.cluster.runs import Cluster, Run

_PROGRAM = """
import sys
from nemo2 import llm
recipe = llm.llama_tiny.pretrain_recipe(dir=sys.argv[1], name="bare", num_nodes=2, num_gpus_per_node=1)
recipe.trainer.max_steps = 3
recipe.trainer.log_every_n_steps = 1
recipe.trainer.limit_val_batches = 0
recipe.trainer.strategy.tensor_model_parallel_size = 1
recipe.trainer.strategy.sequence_parallel = False
if __name__ == "__main__":
    import fiddle
    fiddle.build(recipe)()
"""


def overhead(cluster: Cluster, told: list[str], *, times: int) -> list[str]:
    """Measure the alternatives in turn, because the machine's speed varies."""
    ours, bare, submitted = [], [], []
    for number in range(max(1, times)):
        bare.append(_bare(cluster, number))
        seconds, until_submitted = _ours(cluster, number)
        ours.append(seconds)
        submitted.append(until_submitted)
    both = statistics.median(ours), statistics.median(bare)
    told.append(
        f"to the first step {both[0]:.1f} s with nemo2 pretrain ({statistics.median(submitted):.1f} s of them until it is "
        f"submitted), {both[1]:.1f} s with a bare sbatch: {both[0] - both[1]:+.1f} s"
    )
    return []


def _bare(cluster: Cluster, number: int) -> float:
    place = cluster.folder / f"bare-{number}"
    place.mkdir()
    (place / "train.py").write_text(_PROGRAM)
    script = place / "bare.sh"
    script.write_text(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=10 --output={place}/out
export PYTHONPATH={shlex.quote(os.environ.get("PYTHONPATH", ""))}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
srun {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \\
    --rdzv-endpoint $head:$((20000 + SLURM_JOB_ID % 10000)) {place}/train.py {place}/runs
"""
    )
    began = time.monotonic()
    cluster.run("sbatch", str(script), cwd=place)
    seconds = _until_a_step(cluster, place, began)
    cluster.wait_for(lambda: not cluster.queue(), what="the end of the bare job")
    return seconds


def _ours(cluster: Cluster, number: int) -> tuple[float, float]:
    run = Run(cluster, f"timed-{number}", steps=3)
    began = time.monotonic()
    process = subprocess.Popen(
        [*run.command, "--detach"], cwd=run.place, env=cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    cluster.wait_for(lambda: bool(cluster.queue()) or process.poll() not in (None, 0), what="a submission")
    submitted = time.monotonic() - began
    seconds = _until_a_step(cluster, run.place, began)
    process.wait()
    cluster.wait_for(lambda: not cluster.queue(), what="the end of the job")
    return seconds, submitted


def _until_a_step(cluster: Cluster, place: Path, began: float) -> float:
    end = began + 600
    while not any(file.stat().st_size for file in place.glob("runs/*/2*/metrics.jsonl")):
        if time.monotonic() > end:
            raise TimeoutError(f"no step in {place}")
        time.sleep(0.1)
    return time.monotonic() - began
