# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core needs where Transformer Engine isn't installed, or can't run: on CPUs, and on GPUs without it."""

from collections.abc import Callable
from typing import Any

import torch

from nemo2.base.backend.extras import has
from nemo2.base.backend.fused_adam import FusedAdam
from nemo2.base.backend.patching import Patch


def recomputation_patch() -> Patch:
    return Patch(
        target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        replacement=_fp8_none_if_false,
        wraps=True,
        why="selective recomputation would call into Transformer Engine",
    )


class OffloadedAdam(torch.optim.AdamW):
    """torch's AdamW, for parameters in host memory, under a class of its own: a patch of ``Adam`` reaches every name of the
    class that it replaces. Megatron-Core saves the step of offloaded parameters from torch's classes only."""


def adam_patches() -> tuple[Patch, ...]:
    optimizer = "megatron.core.optimizer"
    why = "torch's AdamW cannot be loaded from a checkpoint of the distributed optimizer"
    return (
        # Before Adam, whose replacement is the one for other names of the same class.
        Patch(target=f"{optimizer}:CPUAdam", replacement=OffloadedAdam, why=why),
        Patch(target=f"{optimizer}:Adam", replacement=FusedAdam, why=why),
        Patch(target=f"{optimizer}:USING_PYTORCH_OPTIMIZER", replacement=False, why=why),
        Patch(target=f"{optimizer}.distrib_optimizer:Adam", replacement=FusedAdam, why=why),
        Patch(target=f"{optimizer}.distrib_optimizer:HAVE_APEX_OR_TE", replacement=True, why=why),
        Patch(target=f"{optimizer}.distrib_optimizer:USING_APEX_OPTIMIZER", replacement=True, why=why),
    )


def kernel_patches() -> tuple[Patch, ...]:
    """For CPUs: Transformer Engine may be installed, and Megatron-Core takes its kernels wherever it can import them."""
    from megatron.core import utils

    why = "the kernels of Transformer Engine, where it is installed, need a GPU"
    local = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
    }
    norm = {"l2_norm_impl": utils.local_multi_tensor_l2_norm, "multi_tensor_scale_tensor_impl": None}
    return tuple(
        Patch(
            target=f"megatron.core.optimizer.{module}:{name}",
            replacement=replacement,
            may_be_absent=name == "multi_tensor_scale_tensor_impl",  # before Megatron-Core 0.19
            why=why,
        )
        for module, functions in {"optimizer": local, "clip_grads": local | norm}.items()
        for name, replacement in functions.items()
    )


def gpu_patches() -> tuple[Patch, ...]:
    """For GPUs. Apex's Adam, where it is installed, stays."""
    return (recomputation_patch(), *(() if has("apex") else adam_patches()))


def _fp8_none_if_false(original: Callable[..., Any], self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
    """Read `fp8=False` as no FP8. Megatron reads this value, its own default, as a request for FP8 (`fp8 is not
    None`)."""
    original(self, fp8 or None, *args, **kwargs)
