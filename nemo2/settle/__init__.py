# SPDX-License-Identifier: Apache-2.0
"""What a recipe will be on a machine: its world, its settings as a run has them, and what the run would refuse."""

from nemo2.settle.machine import Machine
from nemo2.settle.world import World, on, world_of

__all__ = ["Machine", "World", "on", "world_of"]
