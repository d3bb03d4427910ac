# SPDX-License-Identifier: Apache-2.0
"""Checks whether optional packages are installed. All checks go through this module.

A check imports nothing and doesn't need torch.
"""

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version

OLDEST_TE = "2.2.0"
"""The oldest Transformer Engine of the extra `te`, whose calls and steps were measured (tests/transformer_engine).
Megatron-Core sets no lower bound on import; `nemo2.settle.te_needs` lists the features that need a newer version."""
ANY_VERSION = "999"
"""Stands for Transformer Engine's version on another machine, where it is unknown. A feature that some version
supports isn't rejected."""

APEX = "fused_weight_gradient_mlp_cuda"
"""Apex's extension with which Megatron-Core's own linear layers add a weight's gradient to its buffer."""

_HOW_TO_GET = {
    "transformer_engine": "install nemo2's extra `te` on a machine with an NVIDIA GPU (pip install 'nemo2[te]')",
    "apex": "nemo2 does not use Apex: what it offers has a counterpart in PyTorch or Transformer Engine",
    "transformers": "install nemo2's extra `hf` (pip install 'nemo2[hf]')",
    "safetensors": "install nemo2's extra `hf` (pip install 'nemo2[hf]')",
    "datasets": "install nemo2's extra `data` (pip install 'nemo2[data]')",
    "psutil": "pip install psutil",
    "nvidia_resiliency_ext": "pip install nvidia-resiliency-ext (Linux with NVIDIA GPUs)",
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
    return f"{module} is not installed; {_HOW_TO_GET.get(module, f'pip install {module}')}"


def installed(package: str) -> str:
    """The version of an installed package, by its name in the index."""
    try:
        return version(package)
    except PackageNotFoundError:  # built from source under another name
        return ANY_VERSION
