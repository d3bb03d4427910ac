# SPDX-License-Identifier: Apache-2.0
"""The contents of a foreign adapter beside its factors: tensors of the release that were trained in full
(``modules_to_save``)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nemo2.base.advice import advice
from nemo2.errors import CheckpointError, ConfigError
from nemo2.hugging_face.adapter_base import Base, named_as_in_table
from nemo2.hugging_face.adapter_rows import short_names
from nemo2.mcore.parallel.norm_names import module_of_key
from nemo2.models.conversion.families import modules_with_weights
from nemo2.models.conversion.table import Entry, released_shapes


def full_modules(
    base: Base, entries: Sequence[Entry], whole: Mapping[str, Tensor], folder: Path
) -> tuple[dict[Entry, Tensor], list[str]]:
    """The nemo2 tensors that such tensors make, by their positions in a checkpoint, and the names of their modules in the
    form of our methods' ``modules_to_save``. If several released tensors make one tensor, rows of missing ones come from
    the base model.

    Args:
        entries: The base model's entries.
        whole: Released tensors by their names in the file.
        folder: The folder, for errors.

    Raises:
        CheckpointError: the base model lacks these tensors, or has them in another size.
        ConfigError: embedding and output layer are one tensor in the base model, but two in the file.
    """
    output = base.conversion.output_name(base.config) if base.config.share_embeddings_and_output_weights else None
    outputs = [tensor for name, tensor in whole.items() if output is not None and name.endswith(output)]
    whole = {name: tensor for name, tensor in whole.items() if output is None or not name.endswith(output)}
    names = {piece.name for entry in entries for piece in entry.pieces if piece.name is not None}
    released = named_as_in_table(whole, base.conversion, names) if whole else {}
    shapes = released_shapes(entries)
    for name, tensor in released.items():
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: {name} is {list(tensor.shape)} in the adapter, but {list(shapes[name])} in the "
                "base. The adapter was trained on a model of another size, or with a resized vocabulary. Use "
                f"that model as the base ({advice('--base', 'base_model=')})."
            )
    trained = {
        entry: _full_tensor(entry, released, base)
        for entry in entries
        if any(piece.name in released for piece in entry.pieces)
    }
    if base.config.share_embeddings_and_output_weights:
        _refuse_untied([trained[entry] for entry in trained if entry.vocabulary], outputs, folder)
    tensors, modules = {}, []
    for entry, tensor in trained.items():
        tensors[replace(entry.by_layer, pieces=())] = tensor
        modules.append(module_of_key(entry.by_layer.key.removeprefix("module.")))
    return tensors, short_names(modules, (name.rpartition(".")[2] for name in modules_with_weights(base.config) or ()))


def _full_tensor(entry: Entry, released: Mapping[str, Tensor], base: Base) -> Tensor:
    parts = [released.get(piece.name or "") for piece in entry.pieces]
    dtype = next(part.dtype for part in parts if part is not None)
    complete = all(piece.name is None or piece.name in released for piece in entry.pieces)
    tensor = torch.zeros(entry.own_shape, dtype=dtype) if complete else base.weights.values(entry).to(dtype)
    row = 0
    for piece, part in zip(entry.pieces, parts, strict=True):
        if part is not None:
            own = part if piece.at is None else part[piece.at]
            rows = (own.T if piece.transposed else own)[piece.start : piece.stop : piece.step]
            tensor[row : row + piece.rows] = rows
        row += piece.rows
    return tensor


def _refuse_untied(embedding: list[Tensor], output: list[Tensor], folder: Path) -> None:
    """Refuse an embedding and an output layer, which are one tensor in the base model, unless the file has both and they are
    equal. peft stores both where it trains them as one, and with ``ensure_weight_tying`` it does so only for an embedding
    that is called embed_tokens."""
    if not embedding and not output:
        return
    if embedding and output and torch.equal(embedding[0][: len(output[0])], output[0]):
        return
    which = (
        "both apart from each other" if embedding and output else "the embedding" if embedding else "the output layer"
    )
    raise ConfigError(
        f"{folder}: modules_to_save has {which}, but in the base, as in Megatron-Core, the embedding and the "
        "output layer are one tensor (tie_word_embeddings). The adapter has split it into two. Train the adapter "
        "with ensure_weight_tying=True. Or merge it in peft, untie the model (tie_word_embeddings=False), and "
        "import that model."
    )
