# SPDX-License-Identifier: Apache-2.0
"""The backend of a rehearsal: the CPU's, with tensors that have a shape and no memory.

Megatron-Core's path runs as on a CPU, and tensors for the GPU go to torch's "meta" device. Code that reads such a
tensor's value (a gradient norm, a flag for overflow) receives a harmless number. `rehearsing()` is the only entry, and
restores the process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo2.base.backend import chosen, cpu_patches
from nemo2.base.backend.base import Override
from nemo2.base.backend.cpu import CpuBackend
from nemo2.base.backend.patching import Patch, Patcher
from nemo2.base.errors import RuntimeFault
from nemo2.preflight.rehearse.silent_group import BACKEND

META = torch.device("meta")

_AS_ON_THE_GPU = ("deallocate_pipeline_outputs", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
"""Settings that the CPU backend overrides and a rehearsal keeps, because nothing is computed."""


class MetaBackend(CpuBackend):
    """`as_on_gpu`: keep settings that need a GPU's kernels where a rehearsal has a counterpart for them."""

    process_group_backend = BACKEND

    def __init__(self, *, as_on_gpu: bool) -> None:
        super().__init__()
        self._as_on_gpu = as_on_gpu

    @property
    def device(self) -> torch.device:
        return META

    def config_overrides(self) -> dict[str, Override]:
        overrides = super().config_overrides()
        if self._as_on_gpu:
            overrides = {name: value for name, value in overrides.items() if name not in _AS_ON_THE_GPU}
        return overrides


@contextlib.contextmanager
def rehearsing(*, as_on_gpu: bool, patches: tuple[Patch, ...] = ()) -> Iterator[MetaBackend]:
    """A context in which a `MetaBackend` is installed and `get_backend()` returns it. ``patches`` are applied on top.

    Raises:
        RuntimeFault: this process sees a GPU, on which the CPU backend's patches must not be active.
    """
    if torch.cuda.is_available():
        raise RuntimeFault(
            "A rehearsal replaces parts of torch.cuda, so its process must not see a GPU. Set CUDA_VISIBLE_DEVICES='' before "
            "the process starts, as `nemo2 rehearse` does."
        )
    before = chosen._backend
    already = isinstance(before, CpuBackend) and before._patcher is not None
    backend = MetaBackend(as_on_gpu=as_on_gpu)
    if already:
        backend._patcher = before._patcher  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    backend.install()
    patcher = Patcher(rebind_in=("megatron", "nemo2"))
    cpu, cpu_patches._CPU = cpu_patches._CPU, META
    chosen._backend = backend
    try:
        patcher.apply([*_ON_META, *patches])
        yield backend
    finally:
        patcher.undo()
        chosen._backend = before
        cpu_patches._CPU = cpu
        if not already:
            # The CPU backend stays installed after its first use, under the backend that owns it.
            owner = before if isinstance(before, CpuBackend) else CpuBackend()
            owner._patcher, chosen._backend = backend._patcher, owner


def _answered(value: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method that reads a tensor's value, replaced on meta by ``value``."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return value if self.device.type == "meta" else original(self, *args, **kwargs)

        return method

    return wrap


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.cuda` of a rehearsal, which moves the tensor to meta."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.device.type == "meta" else self.to(META)

    return method


_NO_VALUE = "a tensor on meta has no value"
_ON_META = (
    Patch(target="torch:Tensor.item", replacement=_answered(0.0), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.tolist", replacement=_answered([0.0]), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.__bool__", replacement=_answered(False), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.__float__", replacement=_answered(0.0), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.__int__", replacement=_answered(0), wraps=True, why=_NO_VALUE),
    Patch(target="torch:Tensor.cuda", replacement=_to, wraps=True, why="there is no GPU"),
    *(
        Patch(
            target=f"megatron.core.transformer.{scaler}.main_loss_backward_scale",
            replacement=None,
            why="a process has one such tensor, which the first step makes; a step after the rehearsal would write to meta",
        )
        for scaler in (
            "moe.moe_utils:MoEAuxLossAutoScaler",
            "experimental_attention_variant.dsa:DSAIndexerLossAutoScaler",
        )
    ),
)
