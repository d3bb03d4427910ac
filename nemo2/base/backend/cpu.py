# SPDX-License-Identifier: Apache-2.0
"""CPUs with gloo, through the same Megatron-Core code as on GPUs.

`install()` applies the tables of `cpu_patches`; `config_overrides()` are the settings that need a GPU. Nothing here is
active on a machine with a GPU, and importing it changes nothing.
"""

import gc
import importlib
import logging
import os
import resource
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version
from torch.utils._device import _device_constructors

from nemo2.base.backend import low_precision_matmul
from nemo2.base.backend.base import Backend, Override
from nemo2.base.backend.extras import has
from nemo2.base.backend.patching import Patch, Patcher
from nemo2.base.errors import RuntimeFault
from nemo2.base.place import here

_JIT = Patch(
    target="megatron.core.jit:jit_fuser",
    replacement=lambda function: function,
    why="torch.compile of small functions costs a C++ compiler and minutes on CPU, and gains nothing there",
)


class CpuBackend(Backend):
    """Trains on the CPU. Ranks communicate over gloo."""

    name = "cpu"
    process_group_backend = "gloo"

    def __init__(self) -> None:
        self._patcher: Patcher | None = None
        self._matmul: Any = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def install(self) -> None:
        """See `Backend.install`.

        Raises:
            RuntimeFault: this machine has a GPU, torch is older than 2.12, psutil is missing, or the installed
                Megatron-Core lacks an attribute that nemo2 replaces.
        """
        if self._patcher is not None:
            return
        if torch.cuda.is_available():
            raise RuntimeFault(
                "The CPU backend was requested on a machine with a GPU, where its replacements would skip "
                "synchronization and device placement without an error. Use get_backend(), or hide the GPU with "
                "CUDA_VISIBLE_DEVICES=''."
            )
        if Version(torch.__version__).release < (2, 12) and here().world_size > 1:
            raise RuntimeFault(
                f"Running on CPUs requires torch 2.12 or newer, and torch {torch.__version__} is installed: its gloo "
                "groups can't reduce and scatter several tensors at once. Run: pip install --upgrade torch"
            )
        if not has("psutil"):
            raise RuntimeFault(
                "psutil is not installed. Megatron-Core's checkpoint writers need it without declaring it, and 0.16.1 "
                "hangs in the first save without it. Run: pip install psutil"
            )
        # Fill this cached set with the original factories now, because `with torch.device("meta")` compares with it.
        _device_constructors()

        patcher = Patcher(rebind_in=("megatron",))
        try:
            self._apply(patcher)
        except BaseException:
            patcher.undo()
            raise
        logging.getLogger(_RNG_LOGGER).addFilter(_no_shared_generator_warning)
        self._patcher = patcher

    def uninstall(self) -> None:
        """Restore the state before `install()`. For tests of the installation itself."""
        if self._patcher is not None:
            self._patcher.undo()
            if self._matmul is not None:
                self._matmul._destroy()
                self._matmul = None
            logging.getLogger(_RNG_LOGGER).removeFilter(_no_shared_generator_warning)
            self._patcher = None

    def set_device(self, device: torch.device) -> None:
        """Nothing to bind: the ranks of a node share its cores."""
        del device

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def memory_figures(self) -> dict[str, int]:
        import psutil

        kernel_unit = 1 if sys.platform == "darwin" else 1024
        return {
            "allocated_bytes": psutil.Process().memory_info().rss,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kernel_unit,
            "capacity_bytes": psutil.virtual_memory().total,
        }

    def reset_peak_memory(self) -> None:
        """The kernel's high-water mark cannot be reset."""

    def config_overrides(self) -> dict[str, Override]:
        kernel = "its kernel needs a GPU"
        graph = "CUDA graphs need a GPU"
        offload = "there is no second memory to move activations to"
        overrides: dict[str, Override] = {
            "deallocate_pipeline_outputs": (False, "gloo may still be sending an output when it is freed"),
            "enable_autocast": (False, "Megatron-Core asks for the autocast of a GPU"),
            "fp8": (None, "FP8 needs Transformer Engine on a GPU"),
            "fp4": (None, "FP4 needs Transformer Engine on a GPU"),
            "cross_entropy_loss_fusion": (False, "it rounds gradients to bfloat16 and has nothing to fuse here"),
            "cross_entropy_fusion_impl": ("native", "the other implementation is Transformer Engine's"),
            "cpu_offloading": (False, offload),
            "fine_grained_activation_offloading": (False, offload),
            "enable_cuda_graph": (False, graph),
            "external_cuda_graph": (False, graph),
            "cuda_graph_impl": ("none", graph),
            "transformer_impl": ("local", "Transformer Engine's layers need a GPU"),
            "delay_wgrad_compute": (False, "only Transformer Engine's layers can delay weight gradients"),
        }
        for name in (
            "apply_rope_fusion",
            "fused_single_qkv_rope",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "memory_efficient_layer_norm",
            "moe_permute_fusion",
            "moe_router_fusion",
            "persist_layer_norm",
            "tp_comm_overlap",
            "use_te_rng_tracker",
        ):
            overrides[name] = (False, kernel)
        return overrides

    def group_overrides(self) -> dict[str, Override]:
        nccl = "it is of NCCL, and ranks on CPUs talk over gloo"
        return {
            "use_sharp": (False, nccl),
            "nccl_communicator_config_path": (None, nccl),
            "pipeline_model_parallel_comm_backend": (None, nccl),
        }

    def _apply(self, patcher: Patcher) -> None:
        with warnings.catch_warnings():
            # Megatron-Core reports missing packages on import, which is expected here.
            warnings.filterwarnings("ignore", message=".*(not installed|Falling back).*")
            # Imported first, because it imports torch._dynamo, which records torch's functions by identity.
            version = importlib.import_module("megatron.core").__version__
            patcher.apply(_patches(), version=version, choose=_without_compile)
            if low_precision_matmul.is_slow():
                warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel")
                self._matmul = low_precision_matmul.in_float32()
        # The threads of a gloo group don't exist in a forked process, such as Megatron-Core's checkpoint writers. Its
        # garbage collection would destroy a group that was garbage at the fork, and wait for these threads for ever.
        os.register_at_fork(after_in_child=gc.freeze)


def _patches() -> Iterator[Patch]:
    from nemo2.base.backend.cpu_patches import TORCH, megatron_patches

    yield from TORCH
    yield _JIT  # before the modules of the next table are imported, because they decorate functions
    yield from megatron_patches()


_RNG_LOGGER = "megatron.core.tensor_parallel.random"


def _no_shared_generator_warning(record: logging.LogRecord) -> bool:
    """Suppress Megatron's warning that the CPU's generator changed while the GPU's is in use. On a CPU they are the
    same generator."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _without_compile(value: Any) -> Any:
    """The function that Megatron-Core gave to torch.compile before `install()`, or `value` itself."""
    # Some modules hold mocks of missing packages, which have every attribute.
    if type(value) is not types.FunctionType and type(value) is not staticmethod:
        return value
    original = getattr(value, "_torchdynamo_orig_callable", None)
    if not isinstance(original, types.FunctionType) or not original.__module__.startswith("megatron."):
        return value
    return staticmethod(original) if isinstance(value, staticmethod) else original
