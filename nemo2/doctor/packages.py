# SPDX-License-Identifier: Apache-2.0
"""The packages that nemo2 needs, in their declared versions, and optional packages with their purposes."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo2.backend.extras import install, requirements, version_of
from nemo2.doctor.finding import Finding

LEAST_PYTHON = (3, 11)

BREAKS: dict[str, str] = {
    "leptonai": "nemo-run imports it unconditionally, but 0.47 removed a module that nemo-run imports: `import nemo_run` fails",
    "psutil": "Megatron-Core's checkpoint writers need it but don't declare it: without psutil, 0.16.1 hangs in the first save",
    "lightning": "the strategy uses loop hooks that 3.0 may change; versions before 2.6.6 lack security fixes",
    "megatron-core": "nemo2 uses its layouts, schedules and checkpoints, and is tested with 0.16.1 to 0.19",
    "torch": "versions before 2.7 lack functions that checkpoints are written with",
}
"""Failures caused by versions outside of the declared range."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """An optional package."""

    package: str
    costs: str
    fix: str
    gpu_only: bool = False


PARTS: tuple[Part, ...] = (
    Part(
        package="transformer-engine",
        costs=(
            "no fp8 or fp4, no fused kernels, no tensor-parallel overlap, no precision-aware optimizer (deepseek_v3 needs "
            "it)"
        ),
        fix=f"{install('te')} on a machine with an NVIDIA GPU and the CUDA toolkit",
        gpu_only=True,
    ),
    Part(
        package="transformers",
        costs="no import from and export to Hugging Face, no AutoTokenizer",
        fix=install("hf"),
    ),
    Part(package="safetensors", costs="no import from and export to Hugging Face", fix=install("hf")),
    Part(package="wandb", costs="no logging to Weights & Biases (log.wandb)", fix="pip install wandb"),
    Part(
        package="mamba-ssm",
        costs="Mamba layers run on plain PyTorch: correct but slow, and without context parallelism",
        fix="pip install mamba-ssm causal-conv1d on a machine with an NVIDIA GPU",
        gpu_only=True,
    ),
    Part(package="causal-conv1d", costs="the same as for mamba-ssm", fix="pip install causal-conv1d", gpu_only=True),
    Part(
        package="flash-attn",
        costs="attention uses PyTorch's or Transformer Engine's kernels",
        fix="pip install flash-attn",
        gpu_only=True,
    ),
    Part(
        package="nvidia-resiliency-ext",
        costs="no straggler detection with NVIDIA's tools",
        fix="pip install nvidia-resiliency-ext",
        gpu_only=True,
    ),
)


def needed() -> Iterator[Finding]:
    """Python, nemo2, and every required package, compared with the declared range."""
    from packaging.requirements import Requirement

    version = platform.python_version()
    good = sys.version_info >= LEAST_PYTHON
    least = ".".join(map(str, LEAST_PYTHON))
    yield Finding(
        topic="Needed",
        name="python",
        state="ok" if good else "broken",
        value=version,
        costs="" if good else f"nemo2 needs {least} or newer",
    )
    yield Finding(topic="Needed", name="nemo2", state="ok", value=version_of("nemo2") or "a checkout")
    for line in requirements():
        requirement = Requirement(line)
        have = version_of(requirement.name)
        fits = have is not None and requirement.specifier.contains(have, prereleases=True)
        wanted = f"'{requirement.name}{requirement.specifier}'"
        yield Finding(
            topic="Needed",
            name=requirement.name,
            state="ok" if fits else "broken",
            value=have or "not installed",
            costs="" if fits else BREAKS.get(requirement.name, f"nemo2 requires {requirement.specifier or 'it'}"),
            fix="" if fits else f"pip install {wanted}",
        )


def optional() -> Iterator[Finding]:
    """Optional packages: the version, or the features that are missing without the package."""
    for part in PARTS:
        have = version_of(part.package)
        yield Finding(
            topic="Optional",
            name=part.package,
            state="ok" if have else "absent",
            value=have or "not installed",
            costs="" if have else part.costs,
            fix="" if have else part.fix,
        )


def commands() -> Iterator[Finding]:
    """Programs and accounts besides Python packages. Secrets are only searched for, never printed."""
    tools = {name: shutil.which(name) for name in ("c++", "ninja")}
    absent = [name for name, path in tools.items() if path is None]
    yield Finding(
        topic="Optional",
        name="C++ compiler, ninja",
        state="absent" if absent else "ok",
        value=f"{' and '.join(absent)} not installed" if absent else str(tools["c++"]),
        costs="on GPUs no recomputation that discards outputs (deepseek_v3): Megatron-Core compiles an extension"
        if absent
        else "",
        fix="apt-get install g++ ninja-build, or your system's package manager" if absent else "",
    )
    token = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")) or _hf_token_file().is_file()
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    yield Finding(
        topic="Optional",
        name="Hugging Face account",
        state="ok" if token else "absent",
        value=("a token is set" if token else "no token") + (", HF_HUB_OFFLINE=1" if offline else ""),
        costs="" if token else "no gated models, such as Llama's tokenizers and weights",
        fix="" if token else "huggingface-cli login, or export HF_TOKEN=...",
    )


def _hf_token_file() -> Path:
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
