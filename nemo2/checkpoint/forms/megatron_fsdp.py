# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of parameters that Megatron-FSDP has sharded by rows.

Megatron-Core's own format for it ("fsdp_dtensor") doesn't support layers stacked under one name, so no other strategy
could read it.
"""

from typing import Any, cast

from torch import nn

from nemo2.checkpoint.forms.sharded import LocalShard, ShardedForm
from nemo2.checkpoint.optimizer_forms import torch_optimizers
from nemo2.mcore.optim.megatron import MegatronOptimizer
from nemo2.mcore.parallel.fsdp import MegatronFSDPChunk
from nemo2.mcore.parallel.stored_names import StoredChunk


class MegatronFSDPForm(ShardedForm):
    """Each rank's shards of the chunks and of Megatron-Core's optimizer."""

    @property
    def _chunks(self) -> list[MegatronFSDPChunk]:
        return cast(list[MegatronFSDPChunk], list(self.parallel))

    @property
    def chunks(self) -> list[StoredChunk]:
        return [chunk.described for chunk in self._chunks]

    def model_state(self) -> dict[str, LocalShard]:
        state: dict[str, LocalShard] = {}
        for index, chunk in enumerate(self._chunks):
            held = chunk.main_parameters()
            buffers = {name: (buffer, None) for name, buffer in cast(nn.Module, chunk.core).named_buffers()}
            for name in chunk.described.stored:
                if values := held.get(name) or buffers.get(name):
                    state[f"{index}.{name}"] = LocalShard.of(chunk.described, name, *values)
        return state

    @property
    def optimizer(self) -> MegatronOptimizer:
        optimizer = self.owner.optimizers[0]
        assert isinstance(optimizer, MegatronOptimizer)
        return optimizer

    @property
    def torch_optimizers(self) -> list[Any]:
        return torch_optimizers(self.optimizer.mcore_optimizer)

    @property
    def scaler(self) -> Any:
        return getattr(self.optimizer.mcore_optimizer, "grad_scaler", None)

    def finish_reading(self, *, model: bool, optimizer: bool) -> None:
        for chunk in self._chunks if model else ():
            chunk.install_main_parameters()

    def layout_record(self) -> dict[str, Any]:
        return super().layout_record() | {"strategy": "MegatronStrategy(fsdp='megatron')"}
