# SPDX-License-Identifier: Apache-2.0
from nemo2.settle.machine import Machine as Machine
from nemo2.settle.parts import Refusal as Refusal
from nemo2.settle.settling import Settled as Settled
from nemo2.settle.settling import settle as settle
from nemo2.settle.world import World as World
from nemo2.settle.world import on as on
from nemo2.settle.world import world_of as world_of
