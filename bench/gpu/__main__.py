# SPDX-License-Identifier: Apache-2.0
"""All GPU figures in one call; see README.md beside this file.

python -m bench.gpu --minutes 9 --output bench/results/gpu
python -m bench.gpu --toy                                  # on a CPU: that it runs
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.cases import GPUS, Case, cases, fits, gpu_for
from bench.gpu.report import NAMES
from nemo2.base.backend.extras import version_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "megatron-core", "transformer-engine", "lightning", "transformers", "accelerate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=9.0, help="start no further case after this long (default 9)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="cases of this name, or whose name has this word"
    )
    parser.add_argument("--arms", nargs="+", choices=["ours", "bare", "hf"], default=["ours", "bare", "hf"])
    parser.add_argument("--repeats", type=int, default=3, help="turns of each arm (default 3)")
    parser.add_argument("--steps", type=int, default=25, help="steps of a turn (default 25)")
    parser.add_argument("--warm-up", type=int, default=10, help="of these not counted (default 10)")
    parser.add_argument("--output", type=Path, help="write gpu.json and gpu.md there, after every case")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU: says that it runs, nothing about speed")
    parser.add_argument(
        "--gpu", choices=GPUS, help="as many layers as this one holds (default: by this machine's memory)"
    )
    parser.add_argument("--fits", action="store_true", help="count what each case needs, and run nothing")
    arguments = parser.parse_args()
    known = cases(arguments.gpu or gpu_here(), toy=arguments.toy, fp8=has_fp8())
    names = {case.name for case in known}
    chosen = [
        case
        for case in known
        if any(word == case.name or (word in case.name and word not in names) for word in arguments.only)
    ]
    if not chosen:
        parser.error(f"--only {' '.join(arguments.only)}: no such case. There are {', '.join(c.name for c in known)}")
    if not 0 <= arguments.warm_up < arguments.steps - 1:
        parser.error(f"--warm-up {arguments.warm_up} leaves no two of --steps {arguments.steps} to count")
    if arguments.fits:
        return print_fits(chosen, arguments.gpu or GPUS[0])
    return run(chosen, arguments)


def gpu_here() -> str:
    """The GPU whose numbers of layers this machine takes; without a GPU, the first of the table."""
    import torch

    if not torch.cuda.is_available():
        return GPUS[0]
    return gpu_for(torch.cuda.get_device_properties(0).total_memory / 2**30)


def has_fp8() -> bool:
    """Whether this machine trains in fp8, if only on a pretended GPU."""
    import torch

    from nemo2.base.backend.extras import have_te

    return torch.cuda.is_available() and have_te()


def clocks() -> dict[str, str]:
    """Clocks and power limit of the GPU, as its driver reports them; empty without a driver."""
    names = (
        "clocks.max.sm",
        "clocks.current.sm",
        "clocks.max.memory",
        "power.limit",
        "persistence_mode",
        "driver_version",
    )
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, (value.strip() for value in told.split(",")), strict=False))


def print_fits(chosen: list[Case], gpu: str) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    verdicts = {case: fits(case, gpu) for case in chosen}
    for case, (fit, gib) in verdicts.items():
        print(f"{case.name:36} {case.layers or 'all':>4} layers {gib:7.1f} GiB  {'fits' if fit else 'DOES NOT FIT'}")
    return 0 if all(fit for fit, _ in verdicts.values()) else 1


def run(chosen: list[Case], arguments: argparse.Namespace) -> int:
    import torch

    from bench.gpu.peak import matrix_product_peaks
    from bench.gpu.report import figures, is_pretend, page
    from nemo2.base.backend.extras import has, have_te

    if not arguments.toy and not torch.cuda.is_available():
        print("This machine has no GPU: --toy runs the same scripts at sizes for a CPU.", file=sys.stderr)
        return 2
    arms = list(arguments.arms)
    left_out = []
    if "hf" in arms and not (has("transformers") and has("accelerate")):
        arms.remove("hf")
        left_out.append("Hugging Face's Trainer, for transformers or accelerate is not installed")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    if is_pretend(device) and not arguments.toy:
        print("This GPU is a pretended one, whose memory is the host's: add --toy.", file=sys.stderr)
        return 2
    if not arguments.toy and not have_te():
        left_out.append(
            "Transformer Engine's layers and fp8, for it is not installed: plain PyTorch layers are measured"
        )
        chosen = [case for case in chosen if case.precision == "bf16"]
    result: dict[str, Any] = {
        "device": device,
        "date": time.strftime("%Y-%m-%d"),
        "toy": arguments.toy,
        "clocks": clocks(),
        "versions": installed_versions(),
        "peaks": matrix_product_peaks(toy=arguments.toy),
        "rows": [],
        "left_out": left_out,
    }
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    began = time.monotonic()
    for number, case in enumerate(chosen, 1):
        print(f"{case.name}: case {number} of {len(chosen)}", file=sys.stderr, flush=True)
        if time.monotonic() - began > 60 * arguments.minutes:
            result["left_out"].append(f"{case.name}, for the time was up")
            continue
        turns = measure(case, [arm for arm in arms if comparable(arm, case)], arguments)
        result["rows"].append(figures(case, turns, result["peaks"], device=device))
        print(json.dumps(result["rows"][-1]), flush=True)
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
            (arguments.output / "gpu.md").write_text(page(result))
    print(page(result))
    return 1 if any("failed" in row["arms"].get("ours", {}) for row in result["rows"]) else 0


def comparable(arm: str, case: Case) -> bool:
    """Neither other arm captures CUDA graphs, and the Trainer has no fp8: the plain row is the comparison."""
    return arm == "ours" or (not case.graphs and (arm == "bare" or case.precision == "bf16"))


def measure(case: Case, arms: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The turns of a case, in a process of its own, so that a GPU's memory is empty and a crash costs one row."""
    command = [sys.executable, "-m", "bench.gpu.worker", json.dumps(dataclasses.asdict(case)), "--arms", *arms]
    command += [
        "--repeats",
        str(arguments.repeats),
        "--steps",
        str(arguments.steps),
        "--warm-up",
        str(arguments.warm_up),
    ]
    turns = []
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("TURN "):
                    turns.append(json.loads(line[5:]))
                    print(progress(case, turns[-1]), file=sys.stderr, flush=True)
        if process.returncode or any("failed" in turn for turn in turns):
            errors.seek(0)
            print(errors.read()[-4000:], file=sys.stderr)
    told = {turn["arm"] for turn in turns}
    turns += [
        {"arm": arm, "repeat": 0, "failed": f"the process ended with {process.returncode}"}
        for arm in arms
        if arm not in told
    ]
    return turns


def progress(case: Case, turn: dict[str, Any]) -> str:
    """A line for a terminal."""
    outcome = turn.get("failed") or f"{len(turn['losses'])} steps"
    if turn.get("seconds") and not case.toy:  # a case that is cut off has no row
        outcome += f" of {statistics.mean(turn['seconds']):.4f} s"
    return f"{case.name}: turn {turn['repeat'] + 1} of {NAMES[turn['arm']]}, {outcome}"


def installed_versions() -> dict[str, str]:
    return {name: found for name in PACKAGES if (found := version_of(name))}


if __name__ == "__main__":
    sys.exit(main())
