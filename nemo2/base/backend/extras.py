# SPDX-License-Identifier: Apache-2.0
"""Checks whether optional packages are installed. All checks go through this module.

A check imports nothing and doesn't need torch.
"""

import importlib.util
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Optional

OLDEST_TE = "2.2.0"
"""The oldest Transformer Engine of the extra `te`, whose calls and steps were measured (tests/transformer_engine).
Megatron-Core sets no lower bound on import; `nemo2.mcore.settle.te_needs` lists the features that need a newer version."""
ANY_VERSION = "999"
"""Stands for Transformer Engine's version on another machine, where it is unknown. A feature that some version
supports isn't rejected."""

DISTRIBUTION = "nemo2"
"""The name of the installed package. It is of no package index, so no message tells to install it by name."""
APEX = "fused_weight_gradient_mlp_cuda"
"""Apex's extension with which Megatron-Core's own linear layers add a weight's gradient to its buffer."""

_EXTRAS = {"transformer_engine": "te", "transformers": "hf", "safetensors": "hf", "datasets": "data"}
"""The extras of nemo2 that bring these packages."""
_FIXES = {
    "nvidia_resiliency_ext": "pip install nvidia-resiliency-ext (Linux with NVIDIA GPUs)",
    "fla": "pip install flash-linear-attention",
    "apex": "nemo2 does not use Apex: what it offers has a counterpart in PyTorch or Transformer Engine",
    APEX: "a CUDA extension of Apex; Transformer Engine accumulates gradients itself",
}


@cache
def has(module: str) -> bool:
    """Whether the top-level `module` can be found. It is not imported, so a broken install still answers True."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # ValueError: a stub without a spec was put in sys.modules, which is how tests hide a package.
        return False


def have_te() -> bool:
    """Whether Transformer Engine's PyTorch layers are usable: the package is installed and there is a GPU.

    Asks torch for the GPU only if the package exists.
    """
    if not has("transformer_engine"):
        return False
    import torch

    return torch.cuda.is_available()


def why_missing(module: str) -> str:
    """A clause for a message: the reason why `module` is not used here, and how to install it."""
    if has(module):
        if module == "transformer_engine" and not have_te():
            return "transformer_engine is installed, but this machine has no GPU for its kernels"
        return f"{module} is installed"
    extra = _EXTRAS.get(module)
    fix = install(extra) if extra else _FIXES.get(module, f"pip install {module}")
    return f"{module} is not installed; {fix}{' on a machine with an NVIDIA GPU' if extra == 'te' else ''}"


def install(extra: str) -> str:
    """The command that installs the packages of an extra of nemo2. It works however nemo2 was installed, from a clone, a
    git address or a wheel, because it names the packages and not nemo2."""
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in requirements(extra))])


@cache
def requirements(extra: str = "") -> tuple[str, ...]:
    """The packages with their versions that nemo2 declares: the required ones, or those of an extra."""
    from packaging.requirements import Requirement

    packages: dict[str, None] = {}
    for line in _declared():
        one = Requirement(line)
        if (one.marker is None or one.marker.evaluate({"extra": ""})) if not extra else _is_of(one, extra):
            if one.name != DISTRIBUTION:
                one.marker = None
                packages[str(one)] = None
            for inner in one.extras if one.name == DISTRIBUTION else ():
                packages |= dict.fromkeys(requirements(inner))
    return tuple(packages)


def _is_of(one: Any, extra: str) -> bool:
    return one.marker is not None and one.marker.evaluate({"extra": extra}) and not one.marker.evaluate({"extra": ""})


def _declared() -> list[str]:
    """The lines of the checkout, whose installed metadata may be older than its code, or of the installed package."""
    file = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if not file.is_file():
        return requires(DISTRIBUTION) or []
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lines = [f"{line}; extra == '{name}'" for name, lines in project["optional-dependencies"].items() for line in lines]
    return [*project["dependencies"], *lines]


@cache
def version_of(package: str) -> Optional[str]:
    """The version of an installed package, by its name in the index. None: it isn't installed under this name."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
