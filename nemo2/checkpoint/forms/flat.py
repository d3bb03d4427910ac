# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of parameters that torch's FullyShardedDataParallel has flattened into one vector per block."""

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nemo2.checkpoint.forms.dtensors import DTensorForm
from nemo2.checkpoint.forms.pieces import Held
from nemo2.parallel.plain_chunk import PlainChunk
from nemo2.parallel.sharded_state import states_may_be_unpickled


class FlatForm(DTensorForm):
    """The form for flat parameters. Torch returns copies of them, which are written back after they are read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._states: tuple[Any, Any] = ({}, {})

    def model_state(self) -> dict[str, Held]:
        state = get_model_state_dict(self._wrapped)
        self._states = (state, self._states[1])
        return self._named(state)

    def optimizer_states(self) -> dict[str, Held]:
        state = get_optimizer_state_dict(self._wrapped, self.optimizer.optimizer)
        self._states = (self._states[0], state)
        return self._named(state["state"])

    def take_up(self, *, model: bool, optimizer: bool) -> None:
        model_state, optimizer_state = self._states
        if model:
            with states_may_be_unpickled():  # the extra states are passed back to their layers
                set_model_state_dict(self._wrapped, model_state)
        if optimizer:
            set_optimizer_state_dict(self._wrapped, self.optimizer.optimizer, optim_state_dict=optimizer_state)
        self._states = ({}, {})

    @property
    def _wrapped(self) -> nn.Module:
        inside: Any = self.parallel[0].module
        return inside.module if isinstance(inside, PlainChunk) else inside

    def _named(self, state: Any) -> dict[str, Held]:
        prefix = "module." if isinstance(self.core, PlainChunk) else ""
        named = {prefix + name: value for name, value in state.items()}
        return {name: self._held(name, value) for name, value in named.items() if name in self.chunk.stored}
