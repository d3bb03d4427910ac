# SPDX-License-Identifier: Apache-2.0
"""Writes a nemo2 checkpoint in the format of released weights: safetensors, their index and config.json.

The checkpoint may come from any layout and strategy. Sizes are known before anything is read, so each file's header is
written first and its tensors follow, most of them as contiguous parts of the checkpoint's files. No model or process
group is built.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from nemo2.base.errors import CheckpointError, ConfigError
from nemo2.checkpoint.context import load_release
from nemo2.checkpoint.directory import WEIGHTS_PATH, comparing, take_place, weights_dir
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.output_folders import new_folder
from nemo2.hugging_face.safetensors_files import CONFIG, INDEX, SHARD_BYTES, plan_shards, write_json
from nemo2.hugging_face.stored import StoredTensors, refuse_misfits, vocabulary_rows
from nemo2.hugging_face.streams import Computed, Planned, Stretch, merged, progress_bar, write_files
from nemo2.hugging_face.tensor_source import cast, weights_dtype
from nemo2.models.conversion.families import conversion_named, conversion_of
from nemo2.models.conversion.pieces import Piece, Shape
from nemo2.models.conversion.release import config_of_release
from nemo2.models.conversion.settings import SPECIAL_TOKENS
from nemo2.models.conversion.table import Conversion, Entry, released_shapes


def export_weights(
    checkpoint: Path | str,
    target: Path | str,
    *,
    config: Optional[Any] = None,
    dtype: Optional[torch.dtype] = None,
    vocab_size: Optional[int] = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    verify: bool = True,
    beside: Optional[Callable[[Path], None]] = None,
    show_progress: Optional[bool] = None,
) -> Path:
    """Write the weights of a checkpoint in Hugging Face's format.

    Needs some hundred megabytes, whatever the size of the model, and no process group.

    Args:
        checkpoint: A checkpoint of any layout and strategy. An optimizer state in it isn't read.
        target: The folder, which appears only when it is complete.
        config: The model's configuration in nemo2. None: as the checkpoint's ``context/`` describes.
        dtype: The dtype of the weights. None: the stored dtype, bit for bit; runs under the FSDP strategies store
            float32.
        vocab_size: Rows of the vocabulary; further rows are padding and are left out. None: the configuration's, else
            those of the tokenizer of the training, else all.
        shard_bytes: The largest size of a file, unless a single tensor is larger.
        overwrite: Replace ``target`` once the new folder is complete.
        verify: Compare the checkpoint's files with the hashes in its manifest.
        beside: A function that is called with the folder before it gets its name, to add further files such as a
            tokenizer's.
        show_progress: Show a bar with the bytes and the remaining time. None: show it if standard error is a terminal.

    Returns:
        The folder.

    Raises:
        CheckpointError: the checkpoint is unreadable, or has tensors that Hugging Face's model lacks; the disk is full; or
            ``target`` exists.
        ConfigError: Hugging Face has no such model, or the checkpoint doesn't describe its model or holds only a part of it.
    """
    dtype = weights_dtype(dtype)
    opened = Checkpoint.open(checkpoint).require_complete()
    opened.refuse_adapters()
    source, manifest = opened.path, opened.manifest
    config = config if config is not None else opened.config()
    conversion = conversion_of(config)
    stored = StoredTensors(weights_dir(source))
    own, config = config, conversion.as_biased(config)
    rows = vocabulary_rows(conversion, config, stored)
    trained = None if manifest is None else manifest.settings.get("tokenizer_vocab_size")
    released = min(vocab_size or getattr(config, "vocab_size", None) or trained or rows, rows)
    entries = tuple(conversion.entries(config, vocab_rows=rows, released_rows=released))
    # Biases that Hugging Face's class has and nemo2's model lacks. They become zeros.
    absent = (entry for entry in entries if entry.key.endswith(".bias") and stored.find(entry) is None)
    lacked = () if config is own else tuple(absent)
    entries = tuple(entry for entry in entries if entry not in lacked)
    refuse_misfits(source, entries, stored)
    tensors = list(_tensors(entries, lacked, stored, dtype))
    shards, index = plan_shards([(one.name, one.dtype, one.shape) for one in tensors], shard_bytes=shard_bytes)
    final = Path(target).expanduser()
    total = sum(shard.size for shard in shards)
    with new_folder(final, total, overwrite=overwrite, reads=[source]) as temporary:
        differing: Callable[[], list[str]] = list
        if verify and manifest is not None:
            names = [name for name in manifest.hashes if name.startswith(f"{WEIGHTS_PATH}/")]
            differing = comparing(source, manifest, names)
        by_name = {tensor.name: tensor for tensor in tensors}
        planned = [
            Planned(
                path=temporary / shard.name,
                stretches=[shard.header, *(part for name in shard.places for part in by_name[name].stretches())],
            )
            for shard in shards
        ]
        with progress_bar(f"Exporting {source.name}", total, show=show_progress) as advance:
            write_files(planned, advance=advance)
        if index is not None:
            write_json(temporary / INDEX, index)
        write_json(temporary / CONFIG, _hf_config(conversion, config, tensors, released, load_release(source)))
        if beside is not None:
            beside(temporary)
        if faults := differing():
            raise CheckpointError(f"{source} is damaged: {'; '.join(faults[:5])}. Nothing was exported.")
        take_place(temporary, final)
    return final


# ------------------------------------------------------------------------------------------------------ what is written


@dataclass(frozen=True)
class _Source:
    """Consecutive rows of a nemo2 tensor, from ``row`` on, that are a piece of a released tensor."""

    entry: Entry
    piece: Piece
    row: int


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor to write."""

    name: str
    shape: Shape
    dtype: torch.dtype
    sources: tuple[_Source, ...]
    stored: StoredTensors

    def stretches(self) -> list[Stretch]:
        """Its bytes, in order, with zeros where nemo2's tensors have no values."""
        if not self.sources:
            return [
                Computed(
                    self.dtype.itemsize * math.prod(self.shape),
                    lambda: iter([torch.zeros(self.shape, dtype=self.dtype)]),
                )
            ]
        parts: dict[Optional[int], list[_Source]] = {}
        for source in self.sources:
            parts.setdefault(source.piece.at, []).append(source)
        stretches: list[Stretch] = []
        for at in sorted(parts, key=lambda one: one or 0):
            stretches += self._part(sorted(parts[at], key=lambda one: (one.piece.start, one.piece.step)))
        return merged(stretches)

    def _part(self, sources: list[_Source]) -> list[Stretch]:
        """The bytes of the whole tensor, or of one slice along its first axis."""
        shape = self.shape if sources[0].piece.at is None else self.shape[1:]
        rows = shape[1] if sources[0].piece.transposed else shape[0]
        if sum(one.piece.rows for one in sources) != rows:
            raise ConfigError(
                f"{self.name}: the conversion table of its family does not define each of its {rows} rows exactly once."
            )
        if not any(source.piece.transposed or source.piece.step > 1 for source in sources):
            return [
                stretch
                for one in sources
                for stretch in self.stored.stretches(one.entry, self.dtype, one.row, one.row + one.piece.rows)
            ]

        def blocks() -> Iterator[Tensor]:
            whole = torch.empty(shape, dtype=self.dtype)
            for source in sources:
                piece, part = source.piece, self.stored.values(source.entry, source.row, source.row + source.piece.rows)
                target = whole.transpose(0, 1) if piece.transposed else whole
                target[piece.start : piece.stop : piece.step] = cast(part, self.dtype, of=self.name)
            yield whole

        return [Computed(self.dtype.itemsize * math.prod(shape), blocks)]


def _tensors(
    entries: Sequence[Entry], lacked: Sequence[Entry], stored: StoredTensors, dtype: Optional[torch.dtype]
) -> Iterator[_Tensor]:
    """The released tensors in the order of the layers, and the ``lacked`` ones."""
    sources: dict[str, list[_Source]] = {}
    for entry in entries:
        row = 0
        for piece in entry.pieces:
            if piece.name is not None:
                sources.setdefault(piece.name, []).append(_Source(entry, piece, row))
            row += piece.rows
    for name, shape in released_shapes(entries).items():
        dtypes = [source.entry.dtype or dtype or stored.dtype_of(source.entry) for source in sources[name]]
        promoted = reduce(torch.promote_types, dtypes)
        yield _Tensor(name=name, shape=shape, dtype=promoted, sources=tuple(sources[name]), stored=stored)
    usual = dtype or stored.dtype_of(entries[0])
    for name, shape in released_shapes(lacked).items():
        yield _Tensor(name=name, shape=shape, dtype=usual, sources=(), stored=stored)


def _hf_config(
    conversion: Conversion,
    config: Any,
    tensors: Sequence[_Tensor],
    vocab_size: int,
    release: Optional[Mapping[str, Any]],
) -> dict[str, Any]:
    """The contents of config.json. ``release``: those of the release that the weights come from. None: they come from none."""
    dtypes = Counter(tensor.dtype for tensor in tensors for _ in range(len(tensor.shape)))
    dtype = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
    ours = copy.copy(config)
    ours.vocab_size = vocab_size
    if release is not None and conversion_named(release) is conversion:
        described = config_of_release(conversion, ours, release)
    else:
        described = {"architectures": [conversion.architectures[0]], **conversion.hf_config(ours)}
        described |= {name: value for name, value in (release or {}).items() if name in SPECIAL_TOKENS}
    # Transformers reads "torch_dtype" up to version 4, and "dtype" from 5 on.
    names = [name for name in ("dtype", "torch_dtype") if name in described] or ["dtype", "torch_dtype"]
    return {**described, **dict.fromkeys(names, dtype)}
