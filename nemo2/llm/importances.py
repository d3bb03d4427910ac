# SPDX-License-Identifier: Apache-2.0
"""Measures how much the parts of a dense model matter for some samples.

Importances are those of Muralidharan et al. 2024 (arXiv:2407.14679), summed over all tokens of the samples. That of a
channel is its absolute value after the norms. That of a neuron of the feed-forward layers, and of a head, is the size
of its output. That of a layer is one minus the cosine of its input and output.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo2.base.backend import get_backend
from nemo2.models.decoding import core_of, logits_of_stage
from nemo2.models.generate import evaluating


@dataclass(frozen=True)
class Importances:
    """The importances of the parts of the whole model, the same on every rank."""

    channels: Tensor
    """``[hidden size]``"""
    neurons: Tensor
    """``[layers, ffn hidden size]``"""
    heads: Tensor
    """``[layers, heads]``"""
    layers: Tensor
    """``[layers]``"""


def importances_of(model: Any, samples: Iterable[Tensor], *, width: bool) -> Importances:
    """Measure the importances. Every rank must call it, with ``samples`` of ``[batch, sequence]``: the same on all
    stages of a pipeline, different on replicas.

    Args:
        width: Also measure inside layers, which each rank must hold whole. False: only ``layers`` of the result isn't
            zero.
    """
    core: Any = core_of(model)
    config = model.config
    shapes = (
        (config.hidden_size,),
        (config.num_layers, config.ffn_hidden_size),
        (config.num_layers, config.num_attention_heads),
    )
    device = get_backend().device
    importances = Importances(*(torch.zeros(shape, device=device) for shape in (*shapes, (config.num_layers,))))
    with evaluating(model), torch.no_grad(), _watching(core, importances, config, width=width):
        for tokens in samples:
            logits_of_stage(core, tokens.to(device))
    for sums in vars(importances).values():
        torch.distributed.all_reduce(sums)  # tensor-parallel ranks count each layer equally often
    return importances


@contextmanager
def _watching(core: Any, importances: Importances, config: Any, *, width: bool) -> Iterator[None]:
    """A context that sums up the outputs of this stage's layers."""

    def behind_a_norm(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        importances.channels.add_(hidden.float().abs().flatten(0, -2).sum(0))

    def neurons(place: int, module: Any, inputs: Any) -> None:
        importances.neurons[place].add_(inputs[0].float().abs().flatten(0, -2).sum(0))

    def heads(place: int, module: Any, inputs: Any) -> None:
        each = inputs[0].float().flatten(0, -2).view(-1, config.num_attention_heads, config.kv_channels)
        importances.heads[place].add_(each.norm(dim=-1).sum(0))

    def layer(place: int, module: Any, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        before = named["hidden_states"] if "hidden_states" in named else inputs[0]
        after = output[0] if isinstance(output, tuple) else output
        alike = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
        importances.layers[place].add_((1 - alike).sum())

    handles = []
    for one in core.decoder.layers:
        place = one.layer_number - 1
        handles.append(one.register_forward_hook(partial(layer, place), with_kwargs=True))
        if width:
            handles += [
                one.input_layernorm.register_forward_hook(behind_a_norm),
                one.pre_mlp_layernorm.register_forward_hook(behind_a_norm),
                one.mlp.linear_fc2.register_forward_pre_hook(partial(neurons, place)),
                one.self_attention.linear_proj.register_forward_pre_hook(partial(heads, place)),
            ]
    if width and core.decoder.final_layernorm is not None:
        handles.append(core.decoder.final_layernorm.register_forward_hook(behind_a_norm))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
