# SPDX-License-Identifier: Apache-2.0
"""The contents of a foreign adapter beside its factors: tensors of the release that were trained in full
(``modules_to_save``)."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nemo2.advice import advice
from nemo2.errors import CheckpointError, ConfigError
from nemo2.hugging_face.adapter_base import Base, named_as_in_table
from nemo2.hugging_face.adapter_rows import short_names, stored_apart
from nemo2.models.conversion.families import modules_with_weights
from nemo2.models.conversion.pieces import Piece
from nemo2.models.conversion.table import Entry, released_shapes
from nemo2.parallel.norm_names import module_of_key


class FullModules:
    """The nemo2 tensors that such tensors make.

    Args:
        entries: The base model's entries.
        whole: Released tensors by their names in the file.
        tied: The file says that embedding and output layer are trained as one (``ensure_weight_tying``).
        folder: The folder, for errors.

    Raises:
        CheckpointError: the base model lacks these tensors, or has them in another size.
        ConfigError: embedding and output layer are one tensor in the base model, but two in the file.
    """

    def __init__(
        self, base: Base, entries: Sequence[Entry], whole: Mapping[str, Tensor], *, tied: bool, folder: Path
    ) -> None:
        self.base, self.folder = base, folder
        known = {piece.name: piece for entry in entries for piece in entry.pieces if piece.name is not None}
        shared = {}
        if base.config.share_embeddings_and_output_weights:
            whole, shared = self._without_output_layer(whole)
        self.whole = named_as_in_table(whole, base.conversion, known) if whole else {}
        self._refuse_other_sizes(released_shapes(entries))
        self.entries = [entry for entry in entries if any(piece.name in self.whole for piece in entry.pieces)]
        self._refuse_untied(shared, tied=tied)

    @cached_property
    def tensors(self) -> dict[Entry, Tensor]:
        """The tensors by their positions in a checkpoint. If several released tensors make one tensor, rows of
        missing ones come from the base model."""
        found = {}
        for entry in self.entries:
            key, stacked, at = stored_apart(entry)
            found[Entry(key=key, shape=(*stacked, *entry.own_shape), at=at, pieces=())] = self._made(entry)
        return found

    @property
    def names(self) -> list[str]:
        """The names of the modules, in the form of our methods' ``modules_to_save``. Short names if all modules of a
        name are included."""
        known = (name.rpartition(".")[2] for name in modules_with_weights(self.base.config) or ())
        named = (module_of_key(stored_apart(entry)[0].removeprefix("module.")) for entry in self.entries)
        return short_names(named, known)

    def _made(self, entry: Entry) -> Tensor:
        dtype = next(self.whole[piece.name].dtype for piece in entry.pieces if piece.name in self.whole)
        ours = all(piece.name is None or piece.name in self.whole for piece in entry.pieces)
        made = torch.zeros(entry.own_shape, dtype=dtype) if ours else self.base.values(entry).to(dtype)
        row = 0
        for piece in entry.pieces:
            if piece.name in self.whole:
                made[row : row + piece.rows] = _rows(self.whole[piece.name], piece)
            row += piece.rows
        return made

    def _without_output_layer(self, whole: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors, and separately those of the output layer, for a base model without an output layer."""
        name = self.base.conversion.output_name(self.base.config)
        apart = {one: tensor for one, tensor in whole.items() if name is not None and one.endswith(name)}
        return {one: tensor for one, tensor in whole.items() if one not in apart}, apart

    def _refuse_untied(self, output: Mapping[str, Tensor], *, tied: bool) -> None:
        if not self.base.config.share_embeddings_and_output_weights:
            return
        embedding = [self._made(entry) for entry in self.entries if entry.vocabulary]
        given = list(output.values())
        if not embedding and not given:
            return
        if embedding and (torch.equal(embedding[0][: len(given[0])], given[0]) if given else tied):
            return
        which = (
            "both apart from each other"
            if embedding and given
            else "the embedding"
            if embedding
            else "the output layer"
        )
        raise ConfigError(
            f"{self.folder}: modules_to_save has {which}, but in the base, as in Megatron-Core, the embedding and the "
            "output layer are one tensor (tie_word_embeddings). The adapter has split it into two. Train the adapter "
            "with ensure_weight_tying=True. Or merge it in peft, untie the model (tie_word_embeddings=False), and "
            "import that model."
        )

    def _refuse_other_sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, tensor in self.whole.items():
            if tuple(tensor.shape) != shapes[name]:
                raise CheckpointError(
                    f"{self.folder}: {name} is {list(tensor.shape)} in the adapter, but {list(shapes[name])} in the "
                    "base. The adapter was trained on a model of another size, or with a resized vocabulary. Use "
                    f"that model as the base ({advice('--base', 'base_model=')})."
                )


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    """A piece's rows of its released tensor."""
    own = tensor if piece.at is None else tensor[piece.at]
    return (own.T if piece.transposed else own)[piece.start : piece.stop : piece.step]
