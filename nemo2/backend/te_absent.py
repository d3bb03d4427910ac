# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core needs where Transformer Engine isn't installed, or can't run: on CPUs, and on GPUs without it."""

import functools
from collections.abc import Callable
from typing import Any

from nemo2.backend.extras import has
from nemo2.backend.fused_adam import FusedAdam
from nemo2.backend.patching import Patch


def recomputation_patch() -> Patch:
    return Patch(
        target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        replacement=_fp8_only_if_asked,
        wraps=True,
        why="selective recomputation would call into Transformer Engine",
    )


def adam_patches() -> tuple[Patch, ...]:
    optimizer = "megatron.core.optimizer"
    why = "torch's AdamW cannot be loaded from a checkpoint of the distributed optimizer"
    return (
        Patch(target=f"{optimizer}:Adam", replacement=FusedAdam, why=why),
        Patch(target=f"{optimizer}:USING_PYTORCH_OPTIMIZER", replacement=False, why=why),
        Patch(target=f"{optimizer}.distrib_optimizer:Adam", replacement=FusedAdam, why=why),
        Patch(target=f"{optimizer}.distrib_optimizer:HAVE_APEX_OR_TE", replacement=True, why=why),
        Patch(target=f"{optimizer}.distrib_optimizer:USING_APEX_OPTIMIZER", replacement=True, why=why),
    )


def gpu_patches() -> tuple[Patch, ...]:
    """For GPUs. Apex's Adam, where it is installed, stays."""
    return (recomputation_patch(), *(() if has("apex") else adam_patches()))


def _fp8_only_if_asked(original: Callable[..., None]) -> Callable[..., None]:
    """Read `fp8=False` as no FP8. Megatron reads this value, its own default, as a request for FP8 (`fp8 is not
    None`)."""

    @functools.wraps(original)
    def __init__(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, fp8 or None, *args, **kwargs)

    return __init__
