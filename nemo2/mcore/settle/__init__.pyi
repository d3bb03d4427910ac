# SPDX-License-Identifier: Apache-2.0
from nemo2.mcore.settle.machine import Machine as Machine
from nemo2.mcore.settle.parts import Refusal as Refusal
from nemo2.mcore.settle.settling import Settled as Settled
from nemo2.mcore.settle.settling import settle as settle
from nemo2.mcore.settle.world import World as World
from nemo2.mcore.settle.world import on as on
from nemo2.mcore.settle.world import world_of as world_of
