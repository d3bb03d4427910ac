# SPDX-License-Identifier: Apache-2.0
"""The shapes of the tensors that Megatron-Core builds from a configuration, by their keys in a checkpoint.

A conversion knows the shapes without building a model, and before it reads or writes a byte. `nemo2.models.walker` knows the
linear layers and the sizes of each part. A test compares the shapes with the tensors that Megatron-Core builds.
"""

from typing import Any

from nemo2.models.conversion.pieces import Shape
from nemo2.models.parts import Attention, DeltaNet, Mixer, Part
from nemo2.models.walker import mtp_layer_name, shape_of

_NORMS = ["final_layernorm", "final_norm", "input_layernorm", "pre_mlp_layernorm", "post_layernorm", "enorm", "hnorm"]
"""The norms that are as wide as the model."""


class TensorShapes:
    """The shapes of one model's tensors.

    Args:
        config: nemo2's configuration.
        vocab_rows: The rows of the embedding, including padding.
    """

    def __init__(self, config: Any, *, vocab_rows: int) -> None:
        self.config, self.vocab_rows = config, vocab_rows
        model = shape_of(config, vocab_rows)
        self._linears = {_stored(name): linear for name, linear in model.linears()}
        layers = (*model.layers, *model.further)
        self._parts = {_stored(f"{layer.name}.{part.name}"): part for layer in layers for part in layer.parts}

    def part_of(self, key: str) -> Part | None:
        """The part of a layer that a tensor belongs to. None: another tensor."""
        return self._parts.get(_in_part(key)[0])

    def of(self, key: str) -> Shape:
        """The shape of the tensor stored under ``key``, without "module." and for one expert.

        Raises:
            KeyError: the key is unknown, which is a mistake in a table.
        """
        module, _, name = key.replace(".experts.experts.", ".experts.").rpartition(".")
        if (linear := self._linears.get(module)) is not None:
            rows, columns = (linear.outputs,), (linear.inputs,)
            own = {"weight": rows + columns, "bias": rows, "expert_bias": rows}
            return {**own, "layer_norm_weight": columns, "layer_norm_bias": columns}[name]
        of_model = self._of_model()
        end = ".".join(key.split(".")[-2:])
        return of_model[end] if end in of_model else self._of_part(self.part_of(key))[_in_part(key)[1]]

    def _of_model(self) -> dict[str, Shape]:
        hidden = self.config.hidden_size
        return {
            "word_embeddings.weight": (self.vocab_rows, hidden),
            "output_layer.weight": (self.vocab_rows, hidden),
            "position_embeddings.weight": (getattr(self.config, "seq_length", 0), hidden),
            "shared_experts.gate_weight": (1, hidden),
            **{f"{norm}.{name}": (hidden,) for norm in _NORMS for name in ("weight", "bias")},
        }

    def _of_part(self, part: Part | None) -> dict[str, Shape]:
        """The weights of a part outside its matrices, and the sections of a mixer's tensors."""
        if isinstance(part, Attention):
            over_heads = getattr(self.config, "qk_layernorm_over_heads", False)
            return {
                "q_layernorm.weight": (part.query_width if over_heads else part.head_dim,),
                "k_layernorm.weight": (part.kv_width // 2 if over_heads else part.head_dim,),
                "core_attention.softmax_offset": (part.heads,),
            }
        if not isinstance(part, Mixer | DeltaNet):
            return {}
        if isinstance(part, Mixer):
            norm, heads, taps = {"norm.weight": (part.inner,)}, part.heads, 4
        else:
            norm, heads, taps = (
                {"out_norm.weight": (part.value_dim,)},
                part.value_heads,
                self.config.linear_conv_kernel_dim,
            )
        return {
            **norm,
            **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
            **{f"in_proj.weight.{name}": (rows, part.hidden) for name, rows in part.sections.items()},
            **{f"conv1d.weight.{name}": (rows, 1, taps) for name, rows in part.sections.items()},
            **{f"conv1d.bias.{name}": (rows,) for name, rows in part.sections.items()},
        }


def _stored(module: str) -> str:
    """The name in checkpoints of a module under `nemo2.models.walker`'s name."""
    return module.replace(f".{mtp_layer_name()}.", ".transformer_layer.")


def _in_part(key: str) -> tuple[str, str]:
    """The full name of the part that a layer's tensor belongs to, and the tensor's name there."""
    steps = key.split(".")
    depth = 5 if steps[0] == "mtp" else 4
    return ".".join(steps[:depth]), ".".join(steps[depth:])
