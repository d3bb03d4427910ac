# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of parameters that torch's ``fully_shard`` has made DTensors."""

from typing import Any

from torch import nn

from nemo2.checkpoint.forms.pieces import Held, PieceForm
from nemo2.optim.sharded import ShardedOptimizer
from nemo2.parallel.megatron_parallel import unwrap
from nemo2.parallel.stored_names import StoredChunk
from nemo2.parallel.transform import tell_of_loaded_weights


class DTensorForm(PieceForm):
    """The form for the single chunk of a strategy that uses torch's ``fully_shard``, and for its `ShardedOptimizer`."""

    chunk: StoredChunk
    """The stored form of the chunk, determined before sharding."""

    def model_state(self) -> dict[str, Held]:
        state = unwrap(self.parallel[0]).state_dict(keep_vars=True)
        return {name: self._held(name, state[name]) for name in self.chunk.stored}

    def _held(self, name: str, value: Any) -> Held:
        chunk = self.chunk
        return Held(chunk.stored[name], value, name=chunk.full_names[name], trained=name in chunk.trained)

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

    def tell_of_what_was_loaded(self, keys: set[str]) -> None:
        stored = self.chunk.stored
        tell_of_loaded_weights(self.core, (name for name in stored if any(rows.key in keys for rows in stored[name])))

    def make_optimizer_state(self) -> None:
        self.optimizer.make_state()

    def stored_objects(self) -> dict[str, Any]:
        return self.chunk.objects

    def added_keys(self) -> frozenset[str]:
        return self.chunk.added

    def layout_record(self) -> dict[str, Any]:
        layout = self.owner.layout
        return {
            "strategy": type(self.owner).__name__,
            "tp": layout.tp,
            "cp": layout.cp,
            "world_size": self.num_ranks,
        }
