# SPDX-License-Identifier: Apache-2.0
"""Step time of the full stack over a bare Megatron-Core loop: the same model, batches and optimizer, in the same processes.

The two take turns (bare, ours, ours, bare, …), and the median over the repeats of the ratio of their median step times is
reported, with both absolute times. The stack is the whole of it: Lightning's Trainer, MegatronStrategy, data sampler and
loader, TimingCallback, TensorBoard and metrics.jsonl at the default cadence of 10 steps.

    python bench/step_time.py                      # one process, and two with TP, PP and DP
    python bench/step_time.py --cases one tiny     # some of them
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, dict[str, Any]] = {
    "one": {"layers": 4, "hidden": 256, "ffn": 768, "heads": 4, "groups": 2, "vocab": 4096, "seq": 256, "gbs": 2},
    "tiny": {"layers": 1, "hidden": 64, "seq": 64, "gbs": 1},
}
CASES["tp2"] = CASES["one"] | {"tp": 2, "sequence_parallel": True}
CASES["pp2"] = CASES["one"] | {"pp": 2, "gbs": 4}
CASES["dp2"] = CASES["one"] | {"gbs": 4, "use_distributed_optimizer": True, "overlap_grad_reduce": True}
RANKS = {"one": 1, "tiny": 1, "tp2": 2, "pp2": 2, "dp2": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--steps", type=int, default=40, help="steps per turn, the first 5 uncounted (default 40)")
    parser.add_argument("--output", type=Path, help="write the figures there as JSON")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, repeats=arguments.repeats, steps=arguments.steps)
        return
    if arguments.repeats < 2 or arguments.steps < 7:
        parser.error("medians need at least --repeats 2 and --steps 7, of which the first 5 steps are not counted")
    rows = [measure(case, repeats=arguments.repeats, steps=arguments.steps) for case in arguments.cases]
    print(f"{'case':6} {'ranks':>5} {'bare ms':>9} {'ours ms':>9} {'ratio':>7} {'spread':>15} {'bare/bare':>10}")
    for row in rows:
        low, high = min(row["ratios"]), max(row["ratios"])
        print(
            f"{row['case']:6} {row['ranks']:5} {row['bare_ms']:9.2f} {row['ours_ms']:9.2f} {row['ratio']:7.3f} "
            f"{low:7.3f} – {high:.3f} {row['bare_over_bare']:10.3f}"
        )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def measure(case: str, *, repeats: int, steps: int) -> dict[str, Any]:
    """Run a case in fresh processes and return its figures."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[case]}"]
    command += [__file__, "--worker", case, "--repeats", str(repeats), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    found = [line.removeprefix("FIGURES ") for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if done.returncode or not found:
        raise SystemExit(f"{case} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[0])


def work(case: str, *, repeats: int, steps: int) -> None:
    """One rank's work: bare Megatron-Core and nemo2 in turn, over one process group."""
    sys.path.insert(0, str(ROOT))
    import torch

    from nemo2.base.backend import get_backend
    from support import bare_megatron

    torch.distributed.init_process_group(get_backend().process_group_backend)
    settings = bare_megatron.Settings(**CASES[case], steps=steps, weight_decay=0.1)
    made = [bare_megatron.random_batches(settings)(step) for step in range(steps)]
    losses: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for turn in range(repeats):
        # The first changes: what grows from turn to turn would else be held against the second.
        for side in ("bare", "ours") if turn % 2 == 0 else ("ours", "bare"):
            bare_megatron.stop_parallel()
            if side == "bare":
                result = bare_megatron.train(settings, made.__getitem__)
                losses[side], step_times = result["losses"], result["step_times"]
            else:
                losses[side], step_times = train_ours(settings, made)
            times[side].append(statistics.median(step_times[5:]))
    if losses["bare"] != losses["ours"]:
        raise SystemExit(f"the two train differently: {losses['bare'][:3]} and {losses['ours'][:3]}")
    if torch.distributed.get_rank() == 0:
        ratios = [ours / bare for bare, ours in zip(times["bare"], times["ours"], strict=True)]
        bare = times["bare"]
        figures = {
            "case": case,
            "ranks": torch.distributed.get_world_size(),
            "settings": asdict(settings),
            "bare_ms": 1e3 * statistics.median(bare),
            "ours_ms": 1e3 * statistics.median(times["ours"]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            # How far two bare turns differ: what the machine's noise alone does to a ratio.
            "bare_over_bare": statistics.median(b / a for a, b in zip(bare, bare[1:], strict=False)),
        }
        print("FIGURES " + json.dumps(figures), flush=True)


def train_ours(settings: Any, batches: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The run of `bare` through nemo2's stack. Returns the losses and the seconds of each step."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.loggers import TensorBoardLogger
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    import nemo2 as nl
    from nemo2 import llm
    from nemo2.callbacks import TimingCallback
    from nemo2.training.run_dir.metrics import JSONLLogger

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return settings.steps * settings.gbs

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            step, row = divmod(index, settings.gbs)
            return {name: value[row] for name, value in batches[step].items()}

    class Data(pl.LightningDataModule):
        seq_length = settings.seq
        global_batch_size = settings.gbs
        micro_batch_size = settings.mbs

        def __init__(self) -> None:
            super().__init__()
            self.data_sampler = nl.MegatronDataSampler(
                seq_len=settings.seq, micro_batch_size=settings.mbs, global_batch_size=settings.gbs
            )

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Samples(), batch_size=settings.mbs)

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.ends: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(outputs["loss"]))
            self.ends.append(time.perf_counter())

    config = llm.LlamaConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        num_query_groups=settings.groups,
        ffn_hidden_size=settings.ffn,
        vocab_size=settings.vocab,
        seq_length=settings.seq,
        rotary_base=10000,
        cross_entropy_loss_fusion=False,  # the bare loop, as Megatron-Core defaults to, has it off
        init_method_std=0.02,
    )
    optim = nl.MegatronOptimizerModule(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=settings.clip_grad,
            use_distributed_optimizer=settings.use_distributed_optimizer,
        )
    )
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        sequence_parallel=settings.sequence_parallel,
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
            overlap_grad_reduce=settings.overlap_grad_reduce,
            overlap_param_gather=settings.overlap_param_gather,
        ),
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as directory:
        trainer = nl.Trainer(
            devices=torch.distributed.get_world_size(),
            max_steps=settings.steps,
            strategy=strategy,
            plugins=nl.MegatronMixedPrecision("32"),
            callbacks=[TimingCallback(), watch],
            logger=[TensorBoardLogger(directory), JSONLLogger(directory)],
            log_every_n_steps=10,
            limit_val_batches=0,
            enable_progress_bar=False,
        )
        trainer.fit(llm.LlamaModel(config, optim=optim), Data())
    seconds = [after - before for before, after in zip(watch.ends, watch.ends[1:], strict=False)]
    return watch.losses, [seconds[0], *seconds]


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "megatron-core", "nemo-run")},
    }


if __name__ == "__main__":
    main()
