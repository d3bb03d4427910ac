# SPDX-License-Identifier: Apache-2.0
"""Runs all examinations in order. A part that can't be examined is a finding, and the others follow."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from nemo2.base.backend.extras import install, requirements, version_of
from nemo2.preflight.doctor.attention import attention
from nemo2.preflight.doctor.finding import Finding, checked
from nemo2.preflight.doctor.machine import devices, launchers, network, resources

LEAST_PYTHON = (3, 11)

BREAKS: dict[str, str] = {
    "leptonai": "nemo-run imports it unconditionally, but 0.47 removed a module that nemo-run imports: `import nemo_run` fails",
    "psutil": "Megatron-Core's checkpoint writers need it but don't declare it: without psutil, 0.16.1 hangs in the first save",
    "lightning": "the strategy uses loop hooks that 3.0 may change; versions before 2.6.6 lack security fixes",
    "megatron-core": "nemo2 uses its layouts, schedules and checkpoints, and is tested with 0.16.1 to 0.19",
    "torch": "versions before 2.7 lack functions that checkpoints are written with",
}
"""Failures caused by versions outside of the declared range."""


OPTIONAL: tuple[tuple[str, str, str], ...] = (
    (
        "transformer-engine",
        "no fp8 or fp4, no fused kernels, no tensor-parallel overlap, no precision-aware optimizer (deepseek_v3 needs it)",
        f"{install('te')} on a machine with an NVIDIA GPU and the CUDA toolkit",
    ),
    ("transformers", "no import from and export to Hugging Face, no AutoTokenizer", install("hf")),
    ("safetensors", "no import from and export to Hugging Face", install("hf")),
    ("wandb", "no logging to Weights & Biases (log.wandb)", "pip install wandb"),
    (
        "mamba-ssm",
        "Mamba layers run on plain PyTorch: correct but slow, and without context parallelism",
        "pip install mamba-ssm causal-conv1d on a machine with an NVIDIA GPU",
    ),
    (
        "flash-linear-attention",
        "gated DeltaNet layers (Qwen3-Next, Qwen 3.5) run on plain PyTorch: correct but slow",
        "pip install flash-linear-attention on a machine with an NVIDIA GPU",
    ),
    ("causal-conv1d", "the same as for mamba-ssm", "pip install causal-conv1d"),
    ("flash-attn", "attention uses PyTorch's or Transformer Engine's kernels", "pip install flash-attn"),
    ("nvidia-resiliency-ext", "no straggler detection with NVIDIA's tools", "pip install nvidia-resiliency-ext"),
)
"""Optional packages: the name, the cost of its absence, and the command that installs it."""


def needed() -> Iterator[Finding]:
    """Python, nemo2, and every required package, compared with the declared range."""
    from packaging.requirements import Requirement

    yield checked(
        sys.version_info >= LEAST_PYTHON,
        topic="Needed",
        name="python",
        value=platform.python_version(),
        costs=f"nemo2 needs {'.'.join(map(str, LEAST_PYTHON))} or newer",
    )
    yield Finding(topic="Needed", name="nemo2", state="ok", value=version_of("nemo2") or "a checkout")
    for line in requirements():
        requirement = Requirement(line)
        installed = version_of(requirement.name)
        yield checked(
            installed is not None and requirement.specifier.contains(installed, prereleases=True),
            topic="Needed",
            name=requirement.name,
            value=installed or "not installed",
            costs=BREAKS.get(requirement.name, f"nemo2 requires {requirement.specifier or 'it'}"),
            fix=f"pip install '{requirement.name}{requirement.specifier}'",
        )


def optional() -> Iterator[Finding]:
    """Optional packages: the version, or the features that are missing without the package."""
    for package, costs, fix in OPTIONAL:
        installed = version_of(package)
        value = installed or "not installed"
        yield checked(installed, otherwise="absent", topic="Optional", name=package, value=value, costs=costs, fix=fix)


def commands() -> Iterator[Finding]:
    """Programs and accounts besides Python packages. Secrets are only searched for, never printed."""
    paths = {name: shutil.which(name) for name in ("c++", "ninja")}
    absent = [name for name, path in paths.items() if path is None]
    yield checked(
        not absent,
        otherwise="absent",
        topic="Optional",
        name="C++ compiler, ninja",
        value=f"{' and '.join(absent)} not installed" if absent else str(paths["c++"]),
        costs="on GPUs no recomputation that discards outputs (deepseek_v3): Megatron-Core compiles an extension",
        fix="apt-get install g++ ninja-build, or your system's package manager",
    )
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    token_file = Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
    token = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")) or token_file.is_file()
    offline = ", HF_HUB_OFFLINE=1" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    yield checked(
        token,
        otherwise="absent",
        topic="Optional",
        name="Hugging Face account",
        value=("a token is set" if token else "no token") + offline,
        costs="no gated models, such as Llama's tokenizers and weights",
        fix="huggingface-cli login, or export HF_TOKEN=...",
    )


PARTS: tuple[Callable[[], Iterator[Finding]], ...] = (
    needed,
    optional,
    commands,
    resources,
    devices,
    attention,
    network,
    launchers,
)


def examine() -> list[Finding]:
    """All findings. Imports torch, but downloads nothing and leaves nothing behind."""
    findings: list[Finding] = []
    for part in PARTS:
        try:
            findings += part()
        except Exception as error:  # anything broken here is the finding
            findings.append(
                Finding(
                    topic="Examination", name=part.__name__, state="broken", value=f"{type(error).__name__}: {error}"
                )
            )
    return findings
