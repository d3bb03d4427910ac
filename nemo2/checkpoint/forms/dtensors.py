# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of parameters that torch has sharded: with ``fully_shard`` or with FullyShardedDataParallel."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nemo2.checkpoint.forms.sharded import LocalShard, ShardedForm
from nemo2.mcore.optim.sharded import ShardedOptimizer
from nemo2.mcore.parallel.megatron_parallel import unwrap
from nemo2.mcore.parallel.plain_chunk import PlainChunk
from nemo2.mcore.parallel.sharded_state import states_may_be_unpickled
from nemo2.mcore.parallel.stored_names import StoredChunk, names_of
from nemo2.mcore.parallel.transform import tell_of_loaded_weights


class DTensorForm(ShardedForm):
    """The form for the single chunk of a strategy that uses torch's ``fully_shard``, and for its `ShardedOptimizer`."""

    chunk: StoredChunk
    """The stored form of the chunk, determined before sharding."""

    @property
    def chunks(self) -> list[StoredChunk]:
        return [self.chunk]

    def model_state(self) -> dict[str, LocalShard]:
        state = self.core.state_dict(keep_vars=True)
        return {name: LocalShard.of(self.chunk, name, state[name]) for name in self.chunk.stored}

    @property
    def optimizer(self) -> ShardedOptimizer:
        optimizer = self.owner.optimizers[0]
        assert isinstance(optimizer, ShardedOptimizer)
        return optimizer

    @property
    def torch_optimizers(self) -> list[Any]:
        return [self.optimizer.optimizer]

    @property
    def scaler(self) -> Any:
        return self.optimizer.scaler

    @property
    def core(self) -> nn.Module:
        return unwrap(self.parallel[0])

    def report_loaded_keys(self, keys: set[str]) -> None:
        tell_of_loaded_weights(self.core, names_of(self.chunk.stored, keys))

    def layout_record(self) -> dict[str, Any]:
        layout = self.owner.layout
        return {
            "strategy": type(self.owner).__name__,
            "tp": layout.tp,
            "cp": layout.cp,
            "world_size": self.owner.num_ranks,
        }


@dataclass(eq=False)
class FlatForm(DTensorForm):
    """The form for parameters that torch's FullyShardedDataParallel has flattened into one vector per block. Torch returns
    copies of them, which are written back after they are read."""

    _states: tuple[Any, Any] = field(default_factory=lambda: ({}, {}), init=False)

    def model_state(self) -> dict[str, LocalShard]:
        state = get_model_state_dict(self._wrapped)
        self._states = (state, self._states[1])
        return self._named(state)

    def optimizer_states(self) -> dict[str, LocalShard]:
        state = get_optimizer_state_dict(self._wrapped, self.optimizer.optimizer)
        self._states = (self._states[0], state)
        return self._named(state["state"])

    def finish_reading(self, *, model: bool, optimizer: bool) -> None:
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

    def _named(self, state: Any) -> dict[str, LocalShard]:
        prefix = "module." if isinstance(self.core, PlainChunk) else ""
        named = {prefix + name: value for name, value in state.items()}
        return {
            name: LocalShard.of(self.chunk, name, value) for name, value in named.items() if name in self.chunk.stored
        }
