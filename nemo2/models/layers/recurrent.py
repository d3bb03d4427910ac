# SPDX-License-Identifier: Apache-2.0
"""What mixers with a recurrence share, Mamba's and linear attention: two projections, the state between two calls while text is
generated, and checkpoints of tensors that concatenate several parts."""

import dataclasses
from abc import abstractmethod
from typing import Any, Optional

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo2.base.errors import ConfigError


@dataclasses.dataclass
class Projections:
    """The classes of the two projections."""

    in_proj: Any
    out_proj: Any


class RecurrentMixer(MegatronModule):
    """A layer that projects its input, mixes it along the sequence, and projects the result.

    Input and output are ``[L, B, hidden_size]``, with ``L`` sharded over the ranks under sequence parallelism.

    Args:
        hidden_size: The width of input and output.
        projected: The width of the first projection's output over all ranks.
        mixed: The width of the second projection's input over all ranks.
    """

    conv1d: nn.Conv1d
    """The convolution in front of the recurrence. The subclass makes it."""
    kind: str
    """The layers' name in errors."""
    sharded: tuple[str, ...]
    """The layer's own parameters whose first dimension is sharded over the tensor-parallel ranks."""

    def __init__(
        self,
        config: Any,
        submodules: Projections,
        layer_number: int,
        *,
        pg_collection: Any,
        hidden_size: int,
        projected: int,
        mixed: int,
    ):
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj: Any = build_module(
            submodules.in_proj,
            hidden_size,
            projected,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.out_proj: Any = build_module(
            submodules.out_proj,
            mixed,
            hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        *,
        inference_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """With an inference context of static batches, continue from the state of the last call.

        Raises:
            ConfigError: packed sequences.
        """
        if packed_seq_params is not None:
            raise ConfigError(f"{self.kind} don't support packed sequences: pad sequences instead.")
        context = inference_context or inference_params
        inputs, state = None, None
        if context is not None and context.sequence_len_offset:
            inputs, state = context.key_value_memory_dict[self.layer_number]
        projected, _ = self.in_proj(hidden_states)
        mixed, inputs, state = self.mix(projected.transpose(0, 1), inputs, state, keep_state=context is not None)
        if context is not None:
            context.key_value_memory_dict[self.layer_number] = (inputs, state)
        return self.out_proj(mixed.transpose(0, 1).contiguous())

    @abstractmethod
    def mix(
        self, projected: Tensor, inputs: Optional[Tensor], state: Optional[Tensor], *, keep_state: bool
    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """What happens between the projections, on ``[B, L, C]``: the output, and the last inputs of the convolution and the last
        state, which the next call takes as ``inputs`` and ``state``. None: the sequence starts here."""

    @abstractmethod
    def sections(self) -> dict[str, dict[str, int]]:
        """The tensors that concatenate several parts, by name, each with the sizes of its parts on this rank."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None, tp_group: Any = None
    ) -> dict[str, Any]:
        """The sharded state in Megatron-Core's form: tensors that concatenate several parts are saved part by part, so that the
        tensor-parallel size may change."""
        del tp_group  # as the layer was built
        projections = ("in_proj.", "out_proj.")
        state = {name: one for name, one in self.named_parameters() if not name.startswith(projections)}
        own = make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(self.sharded, 0), sharded_offsets)
        for name in ("in_proj", "out_proj"):
            own |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        for name, sizes in self.sections().items():
            own[prefix + name] = _in_sections(own[prefix + name], sizes)
        return own


def _in_sections(tensor: ShardedTensor, sizes: dict[str, int]) -> ShardedTensorFactory:
    """A tensor whose parts are saved separately, each sharded over the ranks, under keys that end in the parts' names."""
    bare = tensor.without_data()

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        whole = dataclasses.replace(
            bare, key=key, data=data, dtype=data.dtype, replica_id=replica_id, flattened_range=flattened_range
        )
        parts, start = [], 0
        for name, size in sizes.items():
            for part in whole.narrow(0, start, size):
                part.key = f"{key}.{name}"
                parts.append(part)
            start += size
        return parts

    def merge(parts: Any) -> Tensor:
        return torch.cat(list(parts))

    assert tensor.data is not None
    return ShardedTensorFactory(tensor.key, tensor.data, build, merge, tensor.replica_id)
