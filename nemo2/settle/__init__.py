# SPDX-License-Identifier: Apache-2.0
"""What a recipe will be on a machine: its world, its settings as a run has them, and what the run would refuse."""

from typing import TYPE_CHECKING, Any

from nemo2.settle.machine import Machine
from nemo2.settle.world import World, on, world_of

if TYPE_CHECKING:
    from nemo2.settle.settling import Settled as Settled
    from nemo2.settle.settling import settle as settle

__all__ = ["Machine", "Settled", "World", "on", "settle", "world_of"]


def __getattr__(name: str) -> Any:
    # Lazy, because counting GPUs needs no torch.
    if name in ("Settled", "settle"):
        from importlib import import_module

        return getattr(import_module("nemo2.settle.settling"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
